"""Addresses of libraries: what is read from them, and what is never shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from gare.errors import LibraryError
from gare.library.store import open_store
from gare.library.store.lance_store import storage_options
from gare.library.store.postgres_link import Link


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me@host/db"),
        ("postgresql://me:s:e%40@one:1,two:2/db?x=y", "postgresql://me@one:1,two:2/db?x=y"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://host/db?password=secret&x=1", "postgresql://host/db?password=…&x=1"),
    ],
)
def test_messages_do_not_tell_the_password(uri: str, shown: str):
    assert Link(uri, read_only=True).shown == shown


SECRET = "hunter2"
MALFORMED = [
    f"postgresql://me:{SECRET}@x@host/db",
    f"postgresql://me:x@{SECRET}@host/db",
    f"postgresql://me:{SECRET}/x@host/db",
    f"postgresql://me:x/{SECRET}@host/db",
    f"postgresql://me:{SECRET}%zz@host/db",
    f"postgresql://me:{SECRET}@[::1/db",
    f"postgresql://me:{SECRET}@127.0.0.1:port/db",
    f"postgresql://me:{SECRET}@127.0.0.1:99999/db",
    f"postgresql://127.0.0.1:1/db?password=a&{SECRET}",
    f"postgresql://127.0.0.1:1/db?pass%77ord={SECRET}",
    f"postgresql://127.0.0.1:1/db?PASSWORD={SECRET}",
    f"postgresql://127.0.0.1:1/db?x=y&password={SECRET}",
    f"postgresql://me:x?{SECRET}@127.0.0.1:1/db?nonsense",
    f"postgresql://me:{SECRET}@127.0.0.1:1/db",
    f"postgresql://me:{SECRET}@/db?host=127.0.0.1&port=1",
    f"postgres://me:{SECRET}@127.0.0.1:1/db",
    f"POSTGRESQL://me:{SECRET}@host/db",
    f"postgrsql://me:{SECRET}@host/db",
    f"postgresql:/me:{SECRET}@host/db",
    f"postgresql:me:{SECRET}@host/db",
    f"host=127.0.0.1 port=1 user=me password={SECRET}",
    f"host=127.0.0.1 port=1 password='x {SECRET}'",
]


@pytest.mark.parametrize("uri", MALFORMED)
def test_a_malformed_address_does_not_tell_the_password_either(uri: str):
    with pytest.raises(LibraryError) as caught:
        open_store(uri)
    told = "".join(traceback.format_exception(caught.value)[-1:])
    assert SECRET not in told
    cause: BaseException | None = caught.value
    while cause is not None:
        assert SECRET not in str(cause)
        cause = cause.__cause__


def test_a_server_that_is_not_there_is_said():
    with pytest.raises(
        LibraryError, match=r"^postgresql://me@127.0.0.1:1/db cannot be reached: .*Check address"
    ):
        open_store("postgresql://me:secret@127.0.0.1:1/db")


def test_an_s3_address_without_a_bucket_is_said():
    with pytest.raises(LibraryError, match="names no bucket"):
        open_store("s3://")


def test_a_name_no_folder_can_have_is_said():
    with pytest.raises(LibraryError, match="too long"):
        open_store("x" * 5000)


def test_an_s3_service_of_ones_own_is_named_by_its_endpoint():
    assert storage_options({}) == {}
    own = storage_options({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"})
    assert own == {"aws_endpoint": "http://127.0.0.1:9000", "allow_http": "true", "aws_region": "us-east-1"}
    other = storage_options({"AWS_ENDPOINT_URL_S3": "https://s3.example.org", "AWS_REGION": "x"})
    assert other == {"aws_endpoint": "https://s3.example.org", "allow_http": "false", "aws_region": "x"}


def test_a_file_is_no_library(tmp_path: Path):
    (tmp_path / "file").write_text("hello")
    with pytest.raises(LibraryError, match="is a file; a library is a folder"):
        open_store(tmp_path / "file")
