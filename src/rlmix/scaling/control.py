"""How another terminal reaches a running run: an address and a key in its folder, and a client.

Invariant: the key is in a file that only its owner can read, and in no command line. Whoever cannot
see the run's folder gives the address as `--run http://HOST:PORT` and the key in the environment.
"""

import os
import re
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import orjson

from rlmix.core.errors import ConfigError, EngineError
from rlmix.observe.lock import is_locked
from rlmix.observe.run_state import read_run_state

CONTROL_FILE = "control.json"
KEY_VARIABLE = "RLMIX_CONTROL_KEY"
OPERATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""It is part of an address."""
ANSWER_LIMIT_S = 20.0
"""The driver answers between two other things that it does."""


def write_control_file(folder: Path, *, url: str, key: str) -> Path:
    """`control.json`, mode 0600 from its first byte."""
    path = folder / CONTROL_FILE
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as writer:
        writer.write(orjson.dumps({"url": url, "key": key, "pid": os.getpid()}))
    return path


class ControlClient:
    """Asks a running run. Every method raises ConfigError for a request that the run refuses, with
    the run's own sentence, and for a run that is not there."""

    def __init__(self, url: str, *, key: str, run: str) -> None:
        self.run = run
        self._url = url.rstrip("/")
        self._key = key
        self._opener = build_opener(ProxyHandler({}))

    @classmethod
    def of_run(cls, folder: Path) -> "ControlClient":
        """Of the run in `folder`, which must be running."""
        name = folder.name
        if not is_locked(folder):
            state = read_run_state(folder).value
            raise ConfigError(
                f"run {name} is not running ({state}); continue it with "
                f"`rlmix train --resume {name}`, or name another one with --run"
            )
        try:
            document = orjson.loads((folder / CONTROL_FILE).read_bytes())
            return cls(str(document["url"]), key=str(document["key"]), run=name)
        except FileNotFoundError:
            raise ConfigError(
                f"run {name} is starting and takes no requests yet; try again in a moment"
            ) from None
        except PermissionError:
            raise ConfigError(
                f"{folder / CONTROL_FILE}: only the user who started run {name} may read it"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{folder / CONTROL_FILE}: not a control file of a run") from None

    @classmethod
    def of_url(cls, url: str, environ: Mapping[str, str]) -> "ControlClient":
        """Of a run on another machine (`net.bind`), with the key from the environment."""
        if not environ.get(KEY_VARIABLE):
            raise ConfigError(
                f"--run {url}: set {KEY_VARIABLE} to the key in {CONTROL_FILE} of the run's folder"
            )
        try:
            return cls(url, key=environ[KEY_VARIABLE], run=urlsplit(url).netloc)
        except ValueError as error:
            raise ConfigError(f"--run {url}: no address ({error}); give http://HOST:PORT") from None

    def pools(self) -> dict[str, Any]:
        """The document of `rlmix scale pools --json`, and what is under way."""
        return self._ask("GET", "/pools")

    def view(self) -> dict[str, Any]:
        """What the run's live view shows."""
        return self._ask("GET", "/view")

    def scale(self, operation_id: str, targets: Mapping[str, int], reason: str) -> dict[str, Any]:
        body = {"id": _checked(operation_id), "targets": dict(targets), "reason": reason}
        return self._ask("POST", "/operations", body)

    def operation(self, operation_id: str) -> dict[str, Any]:
        return self._ask("GET", f"/operations/{_checked(operation_id)}")

    def cancel(self, operation_id: str, reason: str) -> dict[str, Any]:
        path = f"/operations/{_checked(operation_id)}/cancel"
        return self._ask("POST", path, {"reason": reason})

    def leave(self, machine: str, within_s: float | None, reason: str) -> dict[str, Any]:
        """The operation that drains a machine."""
        body = {"machine": machine, "within_s": within_s, "reason": reason}
        return self._ask("POST", "/machines/leave", body)

    def stay(self, machine: str, reason: str) -> dict[str, Any]:
        """The operation that drained it; empty where it is forgotten."""
        return self._ask("POST", "/machines/stay", {"machine": machine, "reason": reason})

    def change_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", "/settings", {"settings": dict(settings)})

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            request = Request(
                self._url + path,
                data=None if body is None else orjson.dumps(body),
                headers={"Authorization": f"Bearer {self._key}"},
                method=method,
            )
            with self._opener.open(request, timeout=ANSWER_LIMIT_S) as response:
                return dict(orjson.loads(response.read()))
        except HTTPError as error:
            raise _refusal(self.run, error) from None
        except (URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"run {self.run} does not answer at {self._url} ({reason}); it may be ending"
            ) from None
        except (HTTPException, ValueError, TypeError) as error:
            raise ConfigError(
                f"run {self.run}: {self._url} is not the control endpoint of a run ({error}); give "
                "--run http://HOST:PORT as its control.json has it"
            ) from None


def _checked(operation_id: str) -> str:
    if not OPERATION_ID.fullmatch(operation_id):
        raise ConfigError(
            f"scale operation {operation_id!r}: an id is 1 to 64 letters, digits, dots, dashes and "
            "underscores, a letter or digit first"
        )
    return operation_id


def _refusal(run: str, error: HTTPError) -> ConfigError | EngineError:
    content = error.read()
    try:
        message = str(orjson.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    if error.code == 401:
        return ConfigError(f"run {run}: the key is not the run's; read {CONTROL_FILE} again")
    if error.code >= 500:
        return EngineError(f"run {run} could not answer ({error.code}): {message}")
    return ConfigError(message)
