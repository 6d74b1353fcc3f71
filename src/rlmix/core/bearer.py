"""The check of a request's key, the same for every server of ours. Pure."""

import hmac
from collections.abc import Mapping


def is_bearer(headers: Mapping[str, str], key: str) -> bool:
    """Whether a request shows `key`, compared in constant time.

    A byte that is no UTF-8 comes as half a character, which no key has.
    """
    given = headers.get("Authorization", "").encode(errors="replace")
    return hmac.compare_digest(given, f"Bearer {key}".encode())
