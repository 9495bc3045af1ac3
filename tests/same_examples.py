"""The same examples of Hypothesis wherever and whenever a test runs."""

from __future__ import annotations

from hypothesis.internal.conjecture import providers


def use_no_constants_of_ours() -> None:
    """Hypothesis also tries constants that it finds in whichever modules of this project are loaded.

    Then other examples are tried when a test runs alone, or after a change to any file, `derandomize` or not,
    and what failed elsewhere cannot be run again.
    """
    assert hasattr(providers, "_get_local_constants")
    providers._get_local_constants = lambda: providers._local_constants
