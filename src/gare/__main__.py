"""What `gare` and `python -m gare` run. It imports next to nothing, to hear Ctrl-C from the start."""

import sys


def main() -> None:
    """Run a command; Ctrl-C ends it without a traceback, also while modules are imported."""
    try:
        from gare.interrupts import interrupts_end_imports

        with interrupts_end_imports():
            from gare.cli.main import main as run

            run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
