"""Runs agent sessions: model turn, bash command, observation, until one of the ends."""
