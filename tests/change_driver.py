"""Changes the model of a library in a process to be killed: `python change_driver.py LIBRARY MODEL NUMBER`.

When so many files are done it says so and waits for ever.
"""

from __future__ import annotations

import sys
import time

from gare.library.index.index_report import IndexProgress
from gare.library.index.index_run import IndexOptions
from gare.library.library import Library


def main() -> None:
    place, model, number = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def on_progress(progress: IndexProgress) -> None:
        print(progress.done, flush=True)
        while progress.done >= number:
            time.sleep(60)

    with Library.open(place) as library:
        options = IndexOptions(num_workers=1, commit_seconds=0.0)
        library.change_model(model, options=options, on_progress=on_progress)


if __name__ == "__main__":
    main()
