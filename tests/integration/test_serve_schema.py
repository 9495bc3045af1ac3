"""schemathesis reads the OpenAPI schema and tries to make the server fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from serve_library import make_served
from serve_process import PATIENT, ServeProcess
from servers import HANG_S

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


def test_no_request_makes_the_server_fail(tmp_path):
    served = make_served(tmp_path)
    with ServeProcess(served.library, options=PATIENT) as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{server.url}/api/v1/openapi.json",
            f"--checks={CHECKS}",
            "--phases=examples,coverage,fuzzing",
            "--max-examples=3",
            f"--request-timeout={HANG_S}",
            "--seed=1",
            "--suppress-health-check=too_slow",  # making a request may take a second on a busy machine
        ]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
        assert result.returncode == 0, result.stdout
        assert "generated" in result.stdout
        assert server.get("/api/v1/search?q=red").status == 200
        assert "Traceback" not in server.log.read_text()
