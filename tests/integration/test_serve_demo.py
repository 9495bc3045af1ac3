"""`gare demo`, as `make demo` runs it: from nothing to a page, until Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request

from gare.library.sample import CLIPS, EXAMPLES
from serve_process import GARE


def listen_to_ctrl_c() -> None:
    """A suite that was started in the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_from_nothing_to_a_page(tmp_path):
    command = [GARE, "demo", "--folder", str(tmp_path / "sample"), "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_ctrl_c,
    ) as process:
        said = ""
        while not (address := re.search(r"http://localhost:\d+", said)):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        with urllib.request.urlopen(f"{address[0]}/?q=a+cup+of+coffee", timeout=60) as page:
            assert "morning coffee.mp4" in page.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "Traceback" not in process.stderr.read()
    assert f"{len(CLIPS)} mp4 files" in said
    first_hits = [said.split(f'"{query}"')[1].splitlines()[1] for query in EXAMPLES]
    folders = [re.search(r"(\w+)/", hit)[1] for hit in first_hits]
    assert folders == ["animals", "kitchen", "space"]
