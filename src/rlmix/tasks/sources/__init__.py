"""Readers of public task sets: local files in, one record per task out. One file per family."""
