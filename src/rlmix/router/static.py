"""Replicas as the command line names them: NAME=URL, NAME=SPEED, NAME=FACT:VALUE,... Pure."""

from collections.abc import Sequence

from rlmix.core.addresses import is_server
from rlmix.router.prober import StaticReplica
from rlmix.router.step_model import StepModel, roofline_prior

FACTS = {
    "bandwidth_tb_s": "memory bandwidth, TB/s",
    "weight_gb": "weights that a step reads, GB",
    "kv_kb": "cache of one token, KB",
    "state_mb": "recurrent state of one request, MB",
    "gflop": "work of one token, GFLOP",
    "tflops": "peak matrix rate, TFLOP/s",
    "fixed_ms": "kernel launches of a step, ms",
}
"""What `--roofline` knows; the first three are needed."""


def parse_replicas(
    named: Sequence[str], speeds: Sequence[str], rooflines: Sequence[str] = ()
) -> tuple[StaticReplica, ...]:
    """Replicas out of the arguments `--replica`, `--speed` and `--roofline`.

    Raises:
        ValueError: one that is malformed or given twice, or a prior of no replica.
    """
    urls: dict[str, str] = {}
    for text in named:
        name, _, url = text.partition("=")
        if not name or not name.isprintable() or not is_server(url):
            raise ValueError(f"--replica {text}: give NAME=URL, e.g. h100-0=http://127.0.0.1:30000")
        if name in urls:
            raise ValueError(f"--replica {text}: the name {name} is given twice")
        urls[name] = url.rstrip("/")
    factors = dict(_speed(text) for text in speeds)
    priors = dict(_roofline(text) for text in rooflines)
    for flag, given in (("--speed", factors), ("--roofline", priors)):
        for name in given:
            if name not in urls:
                known = ", ".join(urls) or "none"
                raise ValueError(f"{flag} {name}=...: no --replica has this name; known: {known}")
    return tuple(
        StaticReplica(name=name, url=url, speed=factors.get(name, 1.0), prior=priors.get(name))
        for name, url in urls.items()
    )


def _speed(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    speed = _positive(value)
    if speed is None:
        raise ValueError(f"--speed {text}: give NAME=X with a number above 0")
    return name, speed


def _roofline(text: str) -> tuple[str, StepModel]:
    name, _, rest = text.partition("=")
    facts: dict[str, float] = {}
    for part in rest.split(","):
        fact, _, value = part.partition(":")
        number = _positive(value)
        if fact not in FACTS or number is None:
            raise ValueError(
                f"--roofline {text}: {part!r} is not FACT:NUMBER with a FACT of {', '.join(FACTS)}"
            )
        facts[fact] = number
    missing = [fact for fact in list(FACTS)[:3] if fact not in facts]
    if missing:
        raise ValueError(f"--roofline {text}: missing {', '.join(missing)}")
    return name, roofline_prior(
        bandwidth_bytes_s=facts["bandwidth_tb_s"] * 1e12,
        weight_bytes=facts["weight_gb"] * 1e9,
        kv_bytes_per_token=facts["kv_kb"] * 1e3,
        state_bytes=facts.get("state_mb", 0.0) * 1e6,
        flops_per_token=facts.get("gflop", 0.0) * 1e9,
        peak_flops_s=facts.get("tflops", 0.0) * 1e12,
        fixed_s=facts.get("fixed_ms", 0.0) * 1e-3,
    )


def _positive(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None
