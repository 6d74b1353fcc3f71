"""One answer out of several shards': counts are added, facts of replicas are taken once. Pure."""

from collections.abc import Sequence
from typing import Any

import orjson

ADDED = ("sessions", "in_flight", "turns", "faults", "errors", "reserved_tokens")
"""Fields of replicas and pools that every shard counts for itself."""

MEANS = ("speed", "step_", "prefill_token_seconds", "version", "busy_frac", "state", "health",
         "pool_ready", "others")  # fmt: skip
"""Beginnings of the names of metrics that are not added up."""


def merge(path: str, answers: Sequence[bytes]) -> tuple[bytes, str]:
    """(body, content type) for `GET path`, from each shard's answer."""
    if path == "/metrics":
        return _metrics([answer.decode() for answer in answers]).encode(), "text/plain"
    documents = [orjson.loads(answer) for answer in answers]
    joined = {"/pools": _pools, "/replicas": _replicas, "/sessions": _sessions}[path](documents)
    return orjson.dumps(joined), "application/json"


def _sessions(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "num_sessions": sum(document["num_sessions"] for document in documents),
        "sessions": [one for document in documents for one in document["sessions"]],
    }


def _replicas(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_name: dict[str, dict[str, Any]] = {}
    for document in documents:
        for one in document["replicas"]:
            held = by_name.setdefault(one["name"], one)
            if held is not one:
                _add(held, one)
                if one["state"] != "ready":
                    held["state"], held["health"] = one["state"], one["health"]
    return {"replicas": list(by_name.values())}


def _pools(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    pools: dict[str, dict[str, Any]] = {}
    for document in documents:
        for name, one in document["pools"].items():
            held = pools.setdefault(name, one)
            if held is not one:
                _add(held, one)
                held["ready"] = min(held["ready"], one["ready"])
    return {
        "pools": pools,
        "waiting": sum(document["waiting"] for document in documents),
        "busy_frac": round(sum(d["busy_frac"] for d in documents) / len(documents), 4),
    }


def _add(held: dict[str, Any], one: dict[str, Any]) -> None:
    for key in ADDED:
        if key in held:
            held[key] += one[key]


def _metrics(texts: Sequence[str]) -> str:
    """Lines of the first text, each with the sum (or mean) over all; lines that only later ones
    have follow."""
    values: dict[str, list[float]] = {}
    order: list[str] = []
    for text in texts:
        for line in text.splitlines():
            if line.startswith("#"):
                key, number = line, 0.0
            else:
                key, _, last = line.rpartition(" ")
                number = float(last)
            if key not in values:
                order.append(key)
            values.setdefault(key, []).append(number)
    lines = []
    for key in order:
        if key.startswith("#"):
            lines.append(key)
            continue
        found = values[key]
        name = key.removeprefix("rlmix_router_")
        total = sum(found) / len(found) if name.startswith(MEANS) else sum(found)
        lines.append(f"{key} {total:g}")
    return "\n".join(lines) + "\n"
