"""A server with options that are not for the command line: `python serve_driver.py LIBRARY OPTIONS`."""

from __future__ import annotations

import json
import sys

from gare.library.library import Library
from gare.serve.app import create_app
from gare.serve.http_server import bind, serve
from gare.serve.observability import set_up_logs
from gare.serve.serve_options import ServeOptions


def main() -> None:
    options = ServeOptions(**json.loads(sys.argv[2]))
    set_up_logs()
    with Library.open(sys.argv[1]) as library:
        serve(create_app(library, options), options, bind(options))


if __name__ == "__main__":
    main()
