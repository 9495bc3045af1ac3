"""Datasets, manifests, decoding, caches and loaders."""
