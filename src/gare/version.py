"""The version of the package, alone: any part may name it without importing `gare` itself."""

__version__ = "0.2.0"
