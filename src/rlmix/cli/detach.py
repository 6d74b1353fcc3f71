"""`rlmix train --detach`: the same command again, as a process that no terminal holds.

The request is checked before, so that what is wrong is said here. Invariant: this command comes
back only when the other process owns its run, or has ended and said why.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlmix.core.errors import ConfigError, ExitCode, LaunchError
from rlmix.observe.lock import is_locked, read_owner
from rlmix.observe.log_follow import DRIVER_LOG

if TYPE_CHECKING:
    from rlmix.config.schema.train import TrainConfig

START_LIMIT_S = 120.0
"""Imports on a loaded machine; the run's folder is made right after them."""
POLL_S = 0.05


def start_detached(
    config: "TrainConfig", overrides: Sequence[str], *, resume: str | None, conf_dir: Path | None
) -> dict[str, object]:
    """Start the run and wait until it has its folder.

    Args:
        overrides: those of this command.
        resume: the run to continue.
    Returns:
        run, run_dir, pid, log.
    Raises:
        ConfigError: it refused the request.
        LaunchError: it ended before; the message has its last lines.
    """
    from rlmix.observe.run_dir import default_name
    from rlmix.observe.runs import find_run, read_tail

    root = Path(config.run.dir)
    arguments = list(overrides)
    if resume is not None:
        run_path = find_run(root, resume)
        arguments += ["--resume", resume]
    else:
        name = config.run.name or default_name()
        run_path = root.resolve() / name
        if config.run.name is None:
            arguments.append(f"run.name={name}")
    if conf_dir is not None:
        arguments += ["--conf-dir", str(conf_dir)]
    root.mkdir(parents=True, exist_ok=True)
    # Beside the run's folder, which the run itself must make; the open file moves into it later.
    early = root / f".{run_path.name}.{os.getpid()}.log"
    with early.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlmix", "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for_owner(process, run_path)
    except LaunchError as error:
        said = read_tail(early, num_lines=15)
        early.unlink(missing_ok=True)
        if process.poll() == ExitCode.BAD_REQUEST and said:
            # It refused the request before it began: the same sentence, the same exit code.
            raise ConfigError("\n".join(said).removeprefix("error: ")) from None
        raise LaunchError("\n".join([f"{error}:", *said])) from None
    except BaseException:
        # Nobody was told of the run, so nobody would watch it.
        process.terminate()
        early.unlink(missing_ok=True)
        raise
    return {
        "run": run_path.name,
        "run_dir": str(run_path),
        "pid": process.pid,
        "log": str(_into_the_run(early, run_path)),
    }


def _wait_for_owner(process: "subprocess.Popen[bytes]", run_path: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        owner = read_owner(run_path)
        if owner is not None and owner.pid == process.pid and is_locked(run_path):
            if (run_path / "logs").is_dir():
                return
        elif process.poll() is not None:
            raise LaunchError(f"train --detach: the run ended at once ({process.returncode})")
        if time.monotonic() > deadline_s:
            process.terminate()
            raise LaunchError(f"train --detach: no run at {run_path} after {START_LIMIT_S:g} s")
        time.sleep(POLL_S)


def _into_the_run(early: Path, run_path: Path) -> Path:
    """What an earlier attempt without a terminal said is kept beside it."""
    log_path = run_path / "logs" / DRIVER_LOG
    if log_path.exists():
        ended_s = int(log_path.stat().st_mtime)
        log_path.replace(log_path.with_name(f"driver-{ended_s}.log"))
    early.replace(log_path)
    return log_path
