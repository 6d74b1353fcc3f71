"""Makes a repository that cannot tell its own future: re-created from the base, scanned, proven."""
