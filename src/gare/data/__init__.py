"""Videos, captions and manifests."""
