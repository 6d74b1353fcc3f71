"""Scoring a policy without training it."""
