"""Keeps credentials out of the files of a run.

Invariant: a text that went through a `Redactor` holds neither the value of an environment variable
whose name says it is a secret, nor the value of a config key that says so.
"""

import re
from collections.abc import Mapping

REDACTED = "***"
MIN_SECRET_CHARS = 8
"""Shorter values ("1", "true") would blank out unrelated text."""

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_?KEY(?:_ID)?|SECRET(?:_?KEY)?|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)$",
    re.IGNORECASE,
)
_NOT_SECRET_NAME = re.compile(r"(?:^|_)(?:pad|eos|bos|unk|stop|mask|sep|cls)_token$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:KEY|PAT|PASSPHRASE|CONNECTION_STRING)$", re.IGNORECASE)
"""What else a variable is called that holds one; keys of a configuration have such names, too, and
hold none (`numerics_key`)."""
_ASSIGNMENT = re.compile(
    r"""^(?P<head>[\s\-+~'"]*(?P<path>[A-Za-z0-9_.@/\-]+)['"]?\s*[=:]\s*)(?P<value>\S.*)$"""
)


def is_secret_name(name: str) -> bool:
    """True for names such as `WANDB_API_KEY`, `token`, `s3_secret_key`; not for `eos_token`."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET_NAME.search(name)


def is_secret_variable(name: str) -> bool:
    """The same for a variable of the environment: also `MY_GATEWAY_KEY` and `GITHUB_PAT`."""
    return is_secret_name(name) or bool(_SECRET_VARIABLE.search(name))


class Redactor:
    """Replaces known secret values; built once per process, so a later `setenv` is not seen."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value
            for name, value in environment.items()
            if is_secret_variable(name) and len(value) >= MIN_SECRET_CHARS
        }
        # Longest first: a secret that contains another one must not leave its tail behind.
        self._values = sorted(values, key=len, reverse=True)
        self._encoded = [value.encode() for value in self._values]

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REDACTED)
        return text

    def line(self, line: bytes) -> bytes:
        for value in self._encoded:
            if value in line:
                line = line.replace(value, REDACTED.encode())
        return line

    def assignments(self, text: str) -> str:
        """Also blank the values of `key: value` and `key=value` lines with a secret name."""
        return "\n".join(_blank_assignment(self.text(line)) for line in text.split("\n"))


def _blank_assignment(line: str) -> str:
    match = _ASSIGNMENT.match(line)
    if match is None:
        return line
    name = match["path"].rsplit(".", 1)[-1]
    if not is_secret_name(name) or match["value"] in ("null", "~", "''", '""'):
        return line
    return match["head"] + REDACTED
