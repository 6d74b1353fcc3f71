"""Policy versions on disk: written once per weight view, checksummed, immutable, monotonic."""
