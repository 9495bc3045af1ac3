"""What is installed has known versions and known hashes."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
# Its builds for CPU, CUDA and ROCm are different files of one version, at different places.
BY_HARDWARE = {"torch"}
# Installed with Python itself, or this package.
OWN = {"gare", "pip"}


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.M)
    return {canonicalize_name(name): version for name, version in found}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


def test_the_lock_has_the_tested_versions():
    assert {name: CONSTRAINTS[name] for name in CONSTRAINTS if name not in BY_HARDWARE} == pins(LOCK)
    assert set(CONSTRAINTS) >= BY_HARDWARE


def test_every_package_of_the_lock_has_hashes_and_comes_from_no_named_place():
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) == len(pins(LOCK))
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), (
            entry[:200]
        )
    assert "://" not in LOCK


def test_what_is_installed_here_is_what_is_locked():
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in distributions()}
    known = {**pins(LOCK), **{name: CONSTRAINTS[name] for name in BY_HARDWARE}}
    other = {
        name: (version, known[name])
        for name, version in installed.items()
        if name in known and version.partition("+")[0] != known[name]
    }
    assert not other
    assert len(installed.keys() & known.keys()) > 30


def install_options() -> list[str]:
    line = next(
        line for line in MAKEFILE.splitlines() if "-r requirements.lock" in line and "pip install" in line
    )
    return shlex.split(line.partition(" install ")[2])[:-2]


def test_a_file_with_another_hash_is_refused(tmp_path):
    """As `make` installs: with the options of its line."""
    assert {"--require-hashes", "--no-deps"} <= set(install_options())
    wheel = tmp_path / "some_package-1.0-py3-none-any.whl"
    info = "some_package-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    lock = tmp_path / "requirements.lock"

    def install(content: bytes) -> subprocess.CompletedProcess[str]:
        lock.write_text(f"some-package==1.0 --hash=sha256:{hashlib.sha256(content).hexdigest()}\n")
        command = [sys.executable, "-m", "pip", "--isolated", "install", *install_options(), "-r", str(lock)]
        command += ["--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "target")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert install(wheel.read_bytes()).returncode == 0
    refused = install(b"another file")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr


@pytest.mark.parametrize("target", ["lock", "sbom", "audit"])
def test_the_targets_are_there(target):
    assert re.search(rf"^{target}:.*##", MAKEFILE, re.M)
