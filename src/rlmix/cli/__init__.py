"""The command line. Parses, loads the configuration, calls one function, answers.

Invariant: importing this package loads neither torch, ray, hydra nor transformers, so that
`rlmix --help` answers at once; every command imports what it needs in its body.
"""

from rlmix.cli.app import main

__all__ = ["main"]
