"""How every command answers: one view for people or one JSON document for scripts, and a code.

Invariant: with `--json` stdout carries exactly one JSON document, whatever libraries and child
processes print; all of that goes to stderr. A fault that the user can act on is one message
without a traceback.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import typer

from rlmix.core.errors import ConfigError, DataError, ExitCode, PlanError, RlmixError

if TYPE_CHECKING:
    from rich.console import RenderableType

BAD_REQUESTS = (ConfigError, PlanError, DataError)
"""Errors that say that the request was wrong; every other `RlmixError` is a failed check."""
LEAST_COLUMNS = 80
"""A narrower terminal wraps tables; squeezed into it they would lose digits."""
_given = [False]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a command has to say."""

    document: Mapping[str, Any]
    """For `--json`."""
    view: Callable[[], "RenderableType"]
    """For people; built only when it is shown."""
    code: int = ExitCode.GOOD


def answered(body: Callable[..., Answer]) -> Callable[..., None]:
    """Turn a function that returns an `Answer` into a command.

    The function's parameter `as_json` decides between document and view.
    """

    @functools.wraps(body)
    def command(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        document_out = _reserve_stdout() if as_json else None
        try:
            answer = body(*args, **kwargs)
        except RlmixError as error:
            code = ExitCode.BAD_REQUEST if isinstance(error, BAD_REQUESTS) else 1
            _fail(str(error), code, document_out)
        except KeyboardInterrupt:
            _fail("interrupted", ExitCode.INTERRUPTED, document_out)
        except Exception as error:
            if document_out is not None:
                _write({"error": f"{type(error).__name__}: {error}"}, document_out)
            raise
        else:
            if document_out is not None:
                _write(answer.document, document_out)
            _console(to_stderr=as_json).print(answer.view())
            raise typer.Exit(int(answer.code))

    return command


def is_given() -> bool:
    """True once this process has written its JSON document."""
    return _given[0]


def _fail(message: str, code: int, document_out: IO[bytes] | None) -> None:
    if document_out is not None:
        _write({"error": message, "exit_code": int(code)}, document_out)
    colour = typer.colors.RED if code != ExitCode.INTERRUPTED else typer.colors.YELLOW
    label = "interrupted" if code == ExitCode.INTERRUPTED else "error"
    text = message if message == label else f"{label}: {message}"
    typer.secho(text, err=True, fg=colour)
    raise typer.Exit(int(code)) from None


def _reserve_stdout() -> IO[bytes]:
    """Keep the real stdout for the document and let everything else print to stderr."""
    sys.stdout.flush()
    document_out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return document_out


def _write(document: Mapping[str, Any], document_out: IO[bytes]) -> None:
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    _given[0] = True
    document_out.write(orjson.dumps(dict(document), option=options))
    document_out.flush()


def _console(*, to_stderr: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    console.width = max(console.width, LEAST_COLUMNS)
    return console
