"""`rlmix scale pools` on a running run: the live table, changes, their progress."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.cli.answer import Answer
from rlmix.core.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rlmix.scaling.control import ControlClient

LOOK_S = 0.5
"""How often a running run is asked."""
FINAL = ("done", "cancelled", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRequest:
    """What the command line asked of a running run."""

    replicas: Mapping[str, int]
    overrides: Sequence[str]
    run: str | None
    directory: Path | None
    conf_dir: Path | None
    watch: bool
    wait_s: float
    """Longest time to follow an operation; 0: do not."""
    operation_id: str | None
    cancel: str | None
    leave: str | None
    """Machine that is about to go."""
    stay: str | None
    """Machine that does not go after all."""
    within_s: float | None
    """Time that the sessions of the one that leaves have."""


def answer_live(asked: LiveRequest) -> Answer:
    """Show, change, cancel or watch.

    Raises:
        ConfigError: there is no such running run, or it refuses.
    """
    _check(asked)
    client = _client(asked)
    if asked.cancel is not None:
        operation = client.cancel(asked.cancel, "cancelled by hand")
        return _followed(client, operation, asked)
    if asked.leave is not None:
        operation = client.leave(asked.leave, asked.within_s, "told to leave")
        return _followed(client, operation, asked)
    if asked.stay is not None:
        client.stay(asked.stay, "told to stay")
        return _shown(client.pools())
    settings = _settings(asked) if asked.overrides else {}
    if settings:
        client.change_settings(settings)
    if asked.replicas:
        name = asked.operation_id or f"by-hand-{secrets.token_hex(4)}"
        try:
            operation = client.scale(name, asked.replicas, "asked for by hand")
        except ConfigError as error:
            if not settings:
                raise
            # They came first, since limits among them may be what makes the change possible.
            raise ConfigError(f"{error} ({', '.join(settings)}: set, and stays so)") from None
        return _followed(client, operation, asked, settings=settings)
    if asked.watch:
        return _watched(client)
    return _shown(client.pools() | ({"settings": settings} if settings else {}))


def _check(asked: LiveRequest) -> None:
    """Nothing that was asked is left out in silence."""
    changes = bool(asked.replicas or asked.overrides)
    if asked.cancel is not None and (changes or asked.operation_id is not None):
        raise ConfigError("scale pools: --cancel goes alone; give the change in another command")
    machine = asked.leave or asked.stay
    others = changes or asked.watch or asked.cancel is not None or asked.operation_id is not None
    if machine is not None and (others or (asked.leave and asked.stay)):
        raise ConfigError(
            "scale pools: --leave and --stay go alone, with --run, --wait and --within; give the "
            "change in another command"
        )
    if asked.within_s is not None and asked.leave is None:
        raise ConfigError("scale pools: --within is the time of a machine that goes; give --leave")
    if asked.watch and (changes or asked.cancel is not None):
        raise ConfigError(
            "scale pools: --watch only shows; a change is followed without it (see --wait)"
        )
    if asked.operation_id is not None and not asked.replicas:
        raise ConfigError("scale pools: --id names a change; give POOL=N, e.g. h100=2")


def _client(asked: LiveRequest) -> "ControlClient":
    from rlmix.config.places import default_runs_dir
    from rlmix.observe.run_state import RunState
    from rlmix.observe.runs import find_run, list_runs
    from rlmix.scaling.control import ControlClient

    if asked.run is not None and asked.run.startswith(("http://", "https://")):
        return ControlClient.of_url(asked.run, os.environ)
    root = default_runs_dir() if asked.directory is None else asked.directory
    if asked.run is not None:
        return ControlClient.of_run(find_run(root, asked.run))
    running = [row for row in list_runs(root) if row.state is RunState.RUNNING]
    if not running:
        raise ConfigError(
            f"scale pools: no run is running in {root}; start one with `rlmix train`, name its "
            "folder with --run, or plan with --dry-run"
        )
    return ControlClient.of_run(running[0].path)


def _settings(asked: LiveRequest) -> dict[str, Any]:
    """KEY=VALUE arguments as typed values, checked with the run's own configuration."""
    from rlmix.config.compose import load_config
    from rlmix.config.places import default_runs_dir
    from rlmix.observe.run_state import RunState
    from rlmix.observe.runs import find_run, list_runs
    from rlmix.scaling.settings import check_live, get_setting

    if asked.run is not None and asked.run.startswith("http"):
        raise ConfigError("scale pools: KEY=VALUE needs the run's folder; run it on its machine")
    root = default_runs_dir() if asked.directory is None else asked.directory
    running = [row.path for row in list_runs(root) if row.state is RunState.RUNNING]
    folder = find_run(root, asked.run) if asked.run is not None else running[0]
    given = (folder / "overrides.txt").read_text().splitlines()
    lines = [line for line in given if line.strip()] + list(asked.overrides)
    config = load_config("train", lines, extra_dir=asked.conf_dir).config
    keys = [text.partition("=")[0] for text in asked.overrides]
    for key in keys:
        check_live(key, config.pools)
    return {key: get_setting(config, key) for key in keys}


def _followed(
    client: "ControlClient",
    operation: Mapping[str, Any],
    asked: LiveRequest,
    *,
    settings: Mapping[str, Any] | None = None,
) -> Answer:
    """Until the operation is over, or the limit has passed."""
    from rlmix.cli.scale_live_view import progress_line

    deadline_s = time.monotonic() + asked.wait_s
    say = _teller()
    is_departure = asked.leave is not None
    while not is_over(operation, is_departure=is_departure) and time.monotonic() < deadline_s:
        say(progress_line(operation))
        time.sleep(LOOK_S)
        operation = client.operation(operation["id"])
    say(progress_line(operation))
    document = client.pools() | {"operation": operation}
    if settings:
        document["settings"] = dict(settings)
    is_open = not is_over(operation, is_departure=is_departure)
    is_good = operation["status"] == ("done" if asked.cancel is None else "cancelled")
    is_good = not is_open if is_departure else is_good
    if is_open and asked.wait_s > 0:
        document["note"] = (
            f"{operation['id']} is still under way after {asked.wait_s:g} s; it goes on by itself: "
            "`rlmix scale pools --watch` shows it, `--cancel` ends it"
        )
        is_good = False
    elif asked.cancel is not None and not (is_good or is_open):
        document["note"] = f"{operation['id']} was over already; nothing was undone"
    code = ExitCode.GOOD if is_good or (is_open and asked.wait_s == 0) else ExitCode.CHECK_FAILED
    return _shown(document, code=code)


def is_over(operation: Mapping[str, Any], *, is_departure: bool) -> bool:
    """A machine is left when its replicas are, whatever else the operation they joined does."""
    if operation["status"] in FINAL:
        return True
    moves = [one for one in operation["replicas"].values() if one["is_move"]]
    return is_departure and all(one["step"] in ("gone", "serving") for one in moves)


def _watched(client: "ControlClient") -> Answer:
    """Draw the table again and again until the run ends, or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from rlmix.cli.scale_live_view import live_view

    code, document = ExitCode.GOOD, client.pools()
    console = Console(stderr=True, highlight=False)
    try:
        with Live(live_view(document), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_S)
                document = client.pools()
                live.update(live_view(document), refresh=True)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except ConfigError:
        pass  # The run has ended.
    return _shown(document, code=code)


def _shown(document: Mapping[str, Any], *, code: int = ExitCode.GOOD) -> Answer:
    from rlmix.cli.scale_live_view import live_view

    return Answer(document=document, view=lambda: live_view(document), code=code)


def _teller() -> Callable[[str], None]:
    """Prints a line to stderr when it says something new."""
    import sys

    last = ""

    def say(line: str) -> None:
        nonlocal last
        if line != last:
            last = line
            print(line, file=sys.stderr, flush=True)

    return say
