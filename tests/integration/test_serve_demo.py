"""`gare demo`, as `make demo` runs it: from nothing to a page, until Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request

from gare.library.sample_videos import CLIPS, EXAMPLES
from servers import HANG_S
from warm import WarmProcess


def test_from_nothing_to_a_page(tmp_path):
    command = ["gare", "demo", "--folder", str(tmp_path / "sample"), "--port", "0"]
    with (
        open(tmp_path / "errors", "w") as errors,
        WarmProcess(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        said = ""
        while not (address := re.search(r"http://localhost:\d+", said)):
            line = process.stdout.readline()
            assert line, (tmp_path / "errors").read_text()
            said += line
        with urllib.request.urlopen(f"{address[0]}/?q=a+cup+of+coffee", timeout=HANG_S) as page:
            assert "morning coffee.mp4" in page.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert "Traceback" not in (tmp_path / "errors").read_text()
    assert f"{len(CLIPS)} mp4 files" in said
    first_hits = [said.split(f'"{query}"')[1].splitlines()[1] for query in EXAMPLES]
    folders = [re.search(r"(\w+)/", hit)[1] for hit in first_hits]
    assert folders == ["animals", "kitchen", "space"]
