"""Closed forms of the paper's appendix."""

from gare.theory import trust_region

__all__ = ["trust_region"]
