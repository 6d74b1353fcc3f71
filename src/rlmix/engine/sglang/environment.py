"""Where SGLang is installed. It pins a torch of its own, so it never shares rlmix's environment.

The default place is the one that `scripts/sglang-env` makes and prints; `sglang.python` in the
configuration names any other. Looking costs a few file accesses; nothing is imported or run.
"""

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "RLMIX_SGLANG_ENV"
"""Folder of the environment, as `scripts/sglang-env` reads it too."""

STAMP = ".rlmix-sglang"
"""In the folder of an environment that the script has made; written last."""

STAND_IN_FOLDER = "no-gpu-driver"
"""Beside `bin`, on machines without a GPU driver: a libcuda.so.1 that answers every call with
CUDA_ERROR_NO_DEVICE, because SGLang's CUDA wheels link against the driver."""


def sglang_python(named: str | None, *, version: str, environ: Mapping[str, str]) -> Path:
    """The interpreter that servers are started with; it may not be there.

    Args:
        named: `sglang.python`; None: the default place.
        version: of SGLang, part of the default place's name.
    """
    if named is not None:
        return Path(named).expanduser()
    folder = environ.get(FOLDER_VARIABLE)
    root = Path(folder) if folder else Path.home() / ".cache" / "rlmix" / f"sglang-{version}"
    return root / "bin" / "python"


def is_runnable(python: Path) -> bool:
    """Is there an interpreter that this user may run?"""
    return python.is_file() and os.access(python, os.X_OK)


def is_being_made(python: Path) -> bool:
    """Does the interpreter lie in an environment that the script began and did not finish?"""
    folder = python.parent.parent
    return folder.with_name(f"{folder.name}.lock").exists() and not (folder / STAMP).exists()


def library_path(python: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`LD_LIBRARY_PATH` with the stand-in for the GPU driver first, where the environment has one.
    Not for servers on a GPU: it would hide the real driver."""
    stand_in = python.parent.parent / STAND_IN_FOLDER
    if not stand_in.is_dir():
        return {}
    others = environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{stand_in}:{others}" if others else str(stand_in)}
