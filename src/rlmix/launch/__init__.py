"""Starts the processes of a run and makes sure that none outlives it."""
