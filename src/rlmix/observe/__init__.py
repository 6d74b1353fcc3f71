"""What a run leaves behind and shows while it works: run directory, metrics, events, views.

Everything here may be read by another process at any time; only the owner of the run's lock writes.
"""
