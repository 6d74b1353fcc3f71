"""What was asked for: YAML values, their types, and every rule they must keep.

The package itself imports nothing. Only `compose` imports hydra and omegaconf; what leaves this
room are plain dataclasses from `schema`.
"""
