"""Is a library as it was written, and if not, make it so: `gare check` and `gare check --repair`."""

from gare.library.check.check_report import CheckReport, Finding
from gare.library.check.check_run import check_library, check_store
from gare.library.check.repair_run import repair_library

__all__ = ["CheckReport", "Finding", "check_library", "check_store", "repair_library"]
