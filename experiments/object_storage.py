"""Object storage for a measurement: SeaweedFS, three volume servers, one copy, as long as a command runs.

    python experiments/object_storage.py FOLDER gare bench serve --replicas 3 --address s3://gare/bench

The command finds it by the variables of AWS. What it wrote stays in FOLDER, so that the next command with the
same FOLDER finds it again; remove the folder when you have done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers import SeaweedFS  # the tests start it in the same way

VOLUME_MB = 1024  # thirty volumes a server: 90 GB at most


def main() -> int:
    """Start the storage, run the command, stop the storage; the command's exit status."""
    folder, *command = sys.argv[1:]
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    storage = SeaweedFS(place, copies=1, volume_mb=VOLUME_MB)
    try:
        return subprocess.run(command, env=os.environ | storage.environment, check=False).returncode
    finally:
        storage.stop()


if __name__ == "__main__":
    sys.exit(main())
