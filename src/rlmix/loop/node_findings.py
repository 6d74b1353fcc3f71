"""From what machines say of themselves to what is missing, each with its fix. Pure.

Invariant: all machines of a run have the versions of the one that asks; a machine that differs is
named, and so is what to do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NEEDED_MEMORY_GIB = 10.0
"""A default run stays below this."""
NEEDED_DISK_GIB = 2.0
"""Checkpoints, weight versions and logs of a default run, with room."""
LEAST_STORE_GB_S = 0.05
"""Slower than this, publishing a version of a small model takes minutes."""
MOST_SKEW_S = 1.0
"""Events of machines further apart are put into a wrong order, and tokens that expire fail."""
STRENGTHS = {
    "namespaces": "strong: namespaces, system call filter",
    "weak": "weak: Landlock and a filter, for code that you trust somewhat",
    "docker": "the engine's: container",
    "podman": "the engine's: container",
    "apptainer": "the engine's: container",
    "remote": "the servers' own",
    "unisolated": "none",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at on one machine."""

    node: str
    name: str
    ok: bool
    detail: str
    fix: str = ""
    is_needed: bool = True
    """False: nothing stops working without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the configuration asks of machines."""

    real_pools: bool
    """Some pool starts real servers."""
    sglang_version: str
    ray_labels: tuple[str, ...] = ()
    """Of the accelerators of such pools."""


def judge(
    facts: Mapping[str, Any],
    *,
    wanted: Wanted,
    asking: Mapping[str, Any],
    is_asking: bool,
    skew_s: float | None = None,
    skew_error_s: float = 0.0,
    ray_label: str | None = None,
) -> list[Finding]:
    """Everything about one machine.

    Args:
        facts: from `node_facts` on it.
        asking: those of the machine that asks, whose versions count.
        is_asking: it is that one.
        skew_s: its clock minus the asking machine's; None: not measured.
        skew_error_s: how far that may be wrong.
        ray_label: what Ray took its accelerators for; None: nothing, or no cluster.
    """
    looks = (
        _software(facts, asking),
        _sglang(facts, wanted),
        _hardware(facts, wanted, ray_label=ray_label, is_asking=is_asking),
        _store(facts, is_asking=is_asking),
        _sandbox(facts),
        _access(facts),
        _clock(skew_s, skew_error_s),
    )
    node = str(facts["host"])
    return [Finding(node=node, **found) for look in looks for found in look]


def unreachable(node: str, why: str) -> Finding:
    """A machine of the cluster that did not answer."""
    return Finding(
        node=node,
        name="answers",
        ok=False,
        detail=why,
        fix="install this rlmix in the environment of its Ray, or take the machine out",
    )


def _software(facts: Mapping[str, Any], asking: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    version = str(facts["python"])
    minor, wanted_minor = _minor(version), _minor(str(asking["python"]))
    is_new_enough = tuple(int(part) for part in minor.split(".")) >= (3, 11)
    yield {
        "name": "python",
        "ok": is_new_enough and minor == wanted_minor,
        "detail": version,
        "fix": f"use Python {wanted_minor} on every machine, 3.11 or newer",
    }
    for package, expected in asking["packages"].items():
        found = facts["packages"].get(package)
        yield {
            "name": package,
            "ok": found is not None and found == expected,
            "detail": found or "not installed",
            "fix": f"install {package} {expected}"
            if expected
            else "run scripts/rlmix, which installs what is pinned",
        }


def _sglang(facts: Mapping[str, Any], wanted: Wanted) -> Iterator[dict[str, Any]]:
    sglang, expected = facts["sglang"], wanted.sglang_version
    detail = f"{sglang['version'] or 'unknown version'} at {sglang['python']}"
    if not sglang["is_there"]:
        detail = f"not at {sglang['python']}; pools can be emulated only"
    yield {
        "name": "sglang",
        "ok": bool(sglang["is_there"]) and sglang["version"] == expected,
        "detail": detail,
        "fix": f"run scripts/sglang-env (SGLang {expected}, 11 GB), or set sglang.python",
        "is_needed": wanted.real_pools,
    }


def _hardware(
    facts: Mapping[str, Any], wanted: Wanted, *, ray_label: str | None, is_asking: bool
) -> Iterator[dict[str, Any]]:
    cores, memory = int(facts["cores"]), float(facts["memory_free_gib"])
    yield {
        "name": "cpu", "ok": cores >= 2, "detail": f"{cores} cores", "fix": "use 2 or more",
        "is_needed": False,
    }  # fmt: skip
    yield {
        "name": "memory",
        "ok": memory >= NEEDED_MEMORY_GIB,
        "detail": f"{memory:.1f} GiB free",
        "fix": f"free {NEEDED_MEMORY_GIB:g} GiB, or use fewer pools (pools=two)",
        "is_needed": is_asking,
    }
    scratch = facts["scratch"]
    yield {
        "name": "disk",
        "ok": scratch["free_gib"] >= NEEDED_DISK_GIB,
        "detail": f"{scratch['free_gib']:.1f} GiB free in {scratch['path']}",
        "fix": f"free {NEEDED_DISK_GIB:g} GiB, or set TMPDIR to another disk",
    }
    gpus = facts["gpus"]
    kinds = sorted({gpu["name"] for gpu in gpus})
    detail = "none; pools are emulated on the CPU"
    if gpus:
        counted = ", ".join(f"{sum(g['name'] == kind for g in gpus)} {kind}" for kind in kinds)
        memory_mib = min((g["memory_mib"] for g in gpus if g["memory_mib"]), default=None)
        detail = f"{counted}, {memory_mib or '?'} MiB each, driver {gpus[0]['driver']}"
    yield {
        "name": "accelerators",
        "ok": bool(gpus),
        "detail": detail,
        "fix": "nothing: a default run needs none",
        "is_needed": False,
    }
    if len(kinds) > 1:
        yield {
            "name": "label",
            "ok": False,
            "detail": f"{len(kinds)} kinds in one machine, and Ray labels only the first",
            "fix": "give the node a custom resource for each kind, and name it in launch.resources",
            "is_needed": wanted.real_pools,
        }
    elif gpus and ray_label is not None:
        yield {
            "name": "label",
            "ok": label_fits(ray_label, kinds[0]),
            "detail": f"Ray calls {kinds[0]} {ray_label}",
            "fix": "start that node's Ray with the right label or a custom resource, and name it "
            "in launch.resources",
            "is_needed": wanted.real_pools,
        }


def label_fits(ray_label: str, name: str) -> bool:
    """`H100` is for `NVIDIA H100 80GB HBM3` and not for `NVIDIA H200`."""
    words = name.upper().replace("-", " ").split()
    return all(
        any(word == part or word.startswith(part) for word in words)
        for part in ray_label.upper().replace("-", " ").split()
    )


def _store(facts: Mapping[str, Any], *, is_asking: bool) -> Iterator[dict[str, Any]]:
    store = facts["store"]
    path = store["path"]
    if store["is_shared"] is False:
        yield {
            "name": "store",
            "ok": False,
            "detail": f"{path} is another folder here than on the asking machine",
            "fix": "mount one file system there on every machine, and set run.dir to it",
        }
        return
    if store["error"]:
        yield {
            "name": "store",
            "ok": False,
            "detail": f"{path}: {store['error']}",
            "fix": "set run.dir to a folder that this user may write to",
        }
        return
    speed = f"writes {store['write_gb_s']:g} GB/s, reads {store['read_gb_s']:g} GB/s"
    is_fast = min(store["write_gb_s"], store["read_gb_s"]) >= LEAST_STORE_GB_S
    has_room = store["free_gib"] >= NEEDED_DISK_GIB
    yield {
        "name": "store",
        "ok": is_fast and has_room,
        "detail": f"{path}: {speed}, {store['free_gib']:.1f} GiB free",
        "fix": f"free {NEEDED_DISK_GIB:g} GiB there, or set run.dir to another disk"
        if not has_room
        else "use a faster file system, or weights.store",
        "is_needed": not has_room,
    }


def _sandbox(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    sandbox = facts["sandbox"]
    if sandbox["error"]:
        yield {"name": "sandbox", "ok": False, "detail": sandbox["error"], "fix": "as said"}
        return
    name = sandbox["backend"]
    strength = STRENGTHS.get(name, "unknown")
    yield {
        "name": "sandbox",
        "ok": True,
        "detail": "; ".join([f"isolated commands work ({name}; {strength})", *sandbox["warnings"]]),
    }


def _access(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {
        "name": "loopback",
        "ok": facts["loopback"] is None,
        "detail": facts["loopback"] or "127.0.0.1 serves",
        "fix": "bring up the loopback interface",
    }
    registry = facts["registry"]
    engines = ", ".join(registry["engines"]) or "no container engine"
    yield {
        "name": "registry",
        "ok": bool(registry["engines"]) and registry["logins"] > 0,
        "detail": f"{engines}; logged in to {registry['logins']} image registries",
        "fix": "for tasks with public images: install an engine, and log in so that pulls are not "
        "turned away as anonymous",
        "is_needed": False,
    }
    hub = facts["hub"]
    token = "a token is set" if hub["has_token"] else "no token"
    if hub["is_offline_mode"]:
        yield {
            "name": "hub", "ok": True, "detail": f"offline mode: cached files only; {token}",
            "is_needed": False,
        }  # fmt: skip
        return
    yield {
        "name": "hub",
        "ok": bool(hub["is_reachable"]),
        "detail": f"{'reachable' if hub['is_reachable'] else 'not reachable'}; {token}",
        "fix": "bundled models and tasks need none; else fetch once where it can be reached, and "
        "set HF_HUB_OFFLINE=1",
        "is_needed": False,
    }


def _clock(skew_s: float | None, error_s: float) -> Iterator[dict[str, Any]]:
    if skew_s is None:
        return
    yield {
        "name": "clock",
        "ok": abs(skew_s) <= MOST_SKEW_S + error_s,
        "detail": f"{skew_s:+.3f} s from the asking machine, known to {error_s:.3f} s",
        "fix": "run a time service (NTP) on that machine",
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
