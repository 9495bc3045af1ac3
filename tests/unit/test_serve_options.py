"""Who may use a server, before one is started."""

from __future__ import annotations

import pytest

from gare.errors import ServeError
from gare.serve.api_schemas import Frame, Hit, item_links
from gare.serve.page_templates import heat_levels
from gare.serve.problems import Problem
from gare.serve.security import is_token, session_value
from gare.serve.serve_options import ServeOptions
from gare.serve.video_bytes import OpenVideo, find_range

TOKEN = "a-token-of-sixteen-or-more"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_needs_no_token(host):
    ServeOptions(host=host).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_network_needs_a_token_or_a_clear_word(host):
    with pytest.raises(ServeError, match="--token"):
        ServeOptions(host=host).check()
    ServeOptions(host=host, token=TOKEN).check()
    ServeOptions(host=host, without_token=True).check()


def test_a_token_or_a_list_decides_on_other_names():
    assert ServeOptions(host="0.0.0.0", token=TOKEN).answers_to("videos.example.org")
    named = ServeOptions(host="0.0.0.0", token=TOKEN, trusted_hosts=("videos.example.org",))
    assert named.answers_to("videos.example.org")
    assert not named.answers_to("evil.example")
    assert not ServeOptions().answers_to("192.168.1.7")
    assert ServeOptions(trusted_hosts=("desk.example.org",)).answers_to("desk.example.org")


@pytest.mark.parametrize("name", ["", "https://a.example", "a.example:443", "a b", "a/b", "*"])
def test_a_trusted_host_is_a_name(name):
    with pytest.raises(ServeError, match="without scheme and port"):
        ServeOptions(trusted_hosts=(name,)).check()


def test_a_proxy_opens_the_server_to_others():
    with pytest.raises(ServeError, match="--trusted-host"):
        ServeOptions(behind_proxy=True, token=TOKEN).check()
    with pytest.raises(ServeError, match="--token"):
        ServeOptions(behind_proxy=True, trusted_hosts=("a.example",)).check()
    with pytest.raises(ServeError, match="--proxy-address"):
        ServeOptions(proxies=("nginx",)).check()
    ServeOptions(
        behind_proxy=True, trusted_hosts=("a.example",), token=TOKEN, proxies=("10.0.0.0/8",)
    ).check()


@pytest.mark.parametrize("token", ["", "short", "sixteen and blanks", "ümlaut-ümlaut-ümlaut"])
def test_weak_tokens_are_refused(token):
    with pytest.raises(ServeError, match="at least 16"):
        ServeOptions(token=token).check()


def test_the_cookie_is_not_the_token():
    options, other = ServeOptions(token=TOKEN), ServeOptions(token=TOKEN + "x")
    assert is_token(TOKEN, options)
    assert not is_token(TOKEN[:-1], options)
    assert not is_token("", ServeOptions())
    assert not is_token("ümlaut\udce9", options)
    assert TOKEN not in session_value(options)
    assert session_value(options) != session_value(other)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", (0, 0)),
        ("bytes=99-", (99, 99)),
        ("bytes=-1000", (0, 99)),
        ("bytes=100-", "unsatisfiable"),
        ("bytes=-0", "unsatisfiable"),
        ("bytes=" + "9" * 30 + "-", "unsatisfiable"),
        ("bytes=-", None),
        ("", None),
        ("bytes=7-3", None),
        ("bytes=0-1, 5-6", None),
    ],
)
def test_ranges(asked, expected):
    assert find_range({"range": asked}, OpenVideo(-1, "x.mp4", 100, 0)) == expected


def test_problems_say_when_to_come_back():
    problem = Problem(503, "busy", "later", retry_after=3, Content_Range="bytes */5")
    assert problem.headers == {"Retry-After": "3", "Content-Range": "bytes */5"}
    assert str(problem) == "later"


def test_heat_is_on_one_scale_for_a_page():
    def hit(item_id: str, *scores: float) -> Hit:
        frames = [Frame(time=float(i), score=score, weight=0.5) for i, score in enumerate(scores)]
        return Hit(
            id=item_id, name="", folder="", path="", start=0, end=1, width=1, height=1, modified="", tags=[],
            duration=1, picture="",
            links=item_links(item_id, ""), score=0, moment=0, frames=frames, duplicates=[],
        )  # fmt: skip

    assert heat_levels([hit("a", 0.0, 0.9), hit("b", 0.1, 0.5)]) == {"a": [0, 9], "b": [0, 0]}
    assert heat_levels([]) == {}
