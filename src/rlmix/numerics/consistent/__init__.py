"""Operators whose result for a token does not depend on what is computed beside it.

Every sum has one order, every attention tile one width, every cast one place, whether the caller
trains on whole sequences, fills a prompt in chunks, or decodes token by token; so a trainer and an
engine that both call them agree bit for bit. docs/consistency.md says which part of that is proved,
which enforced and which observed.
"""
