"""From the plan's command of a server to the process that is started for it.

The plan says `PYTHON -m sglang.launch_server ARGUMENTS`, which anybody can type. What runs is the
same with `serve.py` in place of the module, so that keys travel in the environment only.
Pure but for reading where the GPU driver's stand-in lies.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmix.core.errors import LaunchError
from rlmix.engine.sglang import serve
from rlmix.engine.sglang.environment import is_runnable, library_path

MODULE = ("-m", "sglang.launch_server")


def start_command(argv: Sequence[str]) -> list[str]:
    """The planned command with `serve.py` in it, and the port left to the system.

    Raises:
        LaunchError: the interpreter is not on this machine.
    """
    python, *rest = argv
    assert tuple(rest[:2]) == MODULE, rest[:2]
    if not is_runnable(Path(python)):
        raise LaunchError(
            f"pools: {python} is not there, so no SGLang server can start on this machine; run "
            "scripts/sglang-env here, or set sglang.python to an interpreter that has it"
        )
    words = ["0" if word == "{port}" else word for word in rest[2:]]
    return [python, "-P", serve.__file__, *words]


def start_environment(
    argv: Sequence[str],
    *,
    ready_path: Path,
    api_key: str | None,
    admin_key: str | None,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Variables of the process beside the planned ones: keys, ready file, the driver's stand-in."""
    added = {serve.READY_VARIABLE: str(ready_path)}
    if api_key is not None:
        added[serve.API_KEY_VARIABLE] = api_key
    if admin_key is not None:
        added[serve.ADMIN_KEY_VARIABLE] = admin_key
    if flags_of(argv).get("device") == "cpu":
        added |= library_path(Path(argv[0]), environ)
    return added


def flags_of(argv: Sequence[str]) -> dict[str, str | bool]:
    """Flag without dashes -> its value, True for a switch. Of several values the first."""
    words = list(argv)
    flags: dict[str, str | bool] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            after = words[index + 1 : index + 2]
            is_switch = not after or after[0].startswith("--")
            flags[word.removeprefix("--")] = True if is_switch else after[0]
    return flags
