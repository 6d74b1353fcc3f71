"""Controlled studies: what the corrections are worth, measured where every number is known."""
