"""Errors a user can meet. The message says: where, what we got, what is allowed, what to do.

Every class stays picklable (message only), because errors cross process boundaries.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit code means; scripts rely on these numbers."""

    GOOD = 0
    CHECK_FAILED = 1
    BAD_REQUEST = 2
    NOT_COMPARABLE = 3
    INTERRUPTED = 130


class RlmixError(Exception):
    """Base of every error that a user can act on."""


class ConfigError(RlmixError, ValueError):
    """The configuration is wrong; the message lists every problem, one a line."""


class PlanError(RlmixError, ValueError):
    """The configuration is well formed but cannot be placed or run as asked."""


class DataError(RlmixError, ValueError):
    """A data file or record is not what its schema says."""


class VersionError(DataError):
    """A file was written by a version of rlmix whose formats this one does not read."""


class EngineError(RlmixError):
    """A sampler engine answered wrongly, too late, or not at all."""


class WeightSyncError(RlmixError):
    """A weight version is missing, damaged or refused by a replica."""


class SandboxError(RlmixError):
    """A sandbox could not be made, or broke for a reason the agent did not cause."""


class TrainerError(RlmixError):
    """The trainer met a non-finite or inconsistent number and stopped before using it."""


class TrainerLostError(TrainerError):
    """A trainer process is gone; what it had done is in the last checkpoint."""


class DivergedError(RlmixError):
    """An alarm whose action is `stop` ended the run; its checkpoint is written."""


class LaunchError(RlmixError):
    """A process of the run could not be started, or did not become ready in time."""


class PlacementError(LaunchError):
    """No machine has what a process asks for, or none had it free in time."""
