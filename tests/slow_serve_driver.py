"""A server over a library whose reading never ends: `python slow_serve_driver.py LIBRARY OPTIONS`.

Every scan gives its first batch again and again. What is read is noted in the file $GARE_TEST_READS: `<` when
a scan begins, `.` for each batch, `>` when it ends. Searches compare with every item, by such a scan.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from gare.library.library import Library
from gare.library.store import Store
from gare.serve.app import create_app
from gare.serve.http_server import bind, end_threads, serve
from gare.serve.observability import set_up_logs
from gare.serve.serve_options import ServeOptions


def note(sign: bytes) -> None:
    with open(os.environ["GARE_TEST_READS"], "ab") as notes:
        notes.write(sign)


def endless(scan: Any, **wanted: Any) -> Iterator[Any]:
    first = next(iter(scan(**wanted)))
    note(b"<")
    try:
        while True:
            note(b".")
            yield first
            time.sleep(0.005)
    finally:
        note(b">")


def main() -> None:
    options = ServeOptions(**json.loads(sys.argv[2]))
    set_up_logs()
    with Library.open(sys.argv[1], read_only=True) as library:
        store: Any = library.store
        store.scan = partial(endless, store.scan)
        store.search = partial(Store.search, store)
        serve(create_app(library, options), options, bind(options))
    end_threads()


if __name__ == "__main__":
    main()
