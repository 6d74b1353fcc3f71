"""Faults that were made after the thresholds were frozen; see `faults`."""

from rlmix.diff.faults import Fault

LATER: tuple[Fault, ...] = ()
