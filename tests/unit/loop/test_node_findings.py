"""What machines say of themselves, and what is made of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlmix.launch.each_node import _skew
from rlmix.loop.node_facts import (
    STORE_BYTES,
    NodeAsk,
    installed_version,
    node_facts,
    parse_gpus,
    registry_facts,
    store_facts,
)
from rlmix.loop.node_findings import Finding, Wanted, judge, label_fits

H200 = {"name": "NVIDIA H200", "memory_mib": 143771, "driver": "570.86.10"}
FACTS: dict[str, Any] = {
    "host": "node1",
    "python": "3.12.4",
    "packages": {"rlmix": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "ray": "2.60.0"},
    "sglang": {"python": "/s/bin/python", "is_there": True, "version": "0.5.23"},
    "gpus": [H200, H200],
    "cores": 8,
    "memory_free_gib": 64.0,
    "scratch": {"path": "/tmp", "free_gib": 90.0},
    "store": {
        "path": "/shared/runs", "is_shared": True, "error": None, "free_gib": 900.0,
        "write_gb_s": 0.9, "read_gb_s": 2.0,
    },
    "sandbox": {"backend": "namespaces", "warnings": [], "error": None},
    "registry": {"engines": ["docker"], "logins": 1},
    "hub": {"is_offline_mode": False, "is_reachable": True, "has_token": False},
    "loopback": None,
}  # fmt: skip
REAL = Wanted(real_pools=True, sglang_version="0.5.23")


def missing(asking: dict[str, Any] = FACTS, *, wanted: Wanted = REAL, **changes: Any) -> dict:
    """Name -> finding, of what is not right, where only `changes` differ from a sound machine."""
    about = {key: changes.pop(key) for key in ("skew_s", "ray_label") if key in changes}
    found = judge({**FACTS, **changes}, wanted=wanted, asking=asking, is_asking=False, **about)
    return {one.name: one for one in found if not one.ok}


def test_a_sound_machine_lacks_nothing() -> None:
    assert missing(ray_label="H200", skew_s=0.02) == {}


def test_every_machine_must_have_the_versions_of_the_one_that_asks() -> None:
    packages = {**FACTS["packages"], "ray": "2.59.0", "torch": None}
    found = missing(packages=packages, python="3.11.9")
    assert {name: one.fix for name, one in found.items()} == {
        "python": "use Python 3.12 on every machine, 3.11 or newer",
        "torch": "install torch 2.13.0",
        "ray": "install ray 2.60.0",
    }
    assert all(one.is_needed and one.node == "node1" for one in found.values())


def test_sglang_is_needed_where_real_pools_are_and_its_version_counts() -> None:
    other = {**FACTS["sglang"], "version": "0.5.24"}
    found = missing(sglang=other)["sglang"]
    assert (found.is_needed, found.detail) == (True, "0.5.24 at /s/bin/python")
    assert "SGLang 0.5.23" in found.fix
    absent = {**other, "is_there": False}
    emulated = Wanted(real_pools=False, sglang_version="0.5.23")
    assert not missing(sglang=absent, wanted=emulated)["sglang"].is_needed


def test_an_accelerator_under_another_name_is_seen() -> None:
    found = missing(ray_label="H100")["label"]
    assert found.detail == "Ray calls NVIDIA H200 H100"
    mixed = missing(gpus=[H200, {**H200, "name": "NVIDIA A100-SXM4-80GB"}], ray_label="H200")
    assert "2 kinds in one machine" in mixed["label"].detail


@pytest.mark.parametrize(
    ("label", "name", "fits"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H200", False),
        ("A100-80G", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80G", "NVIDIA A100-SXM4-40GB", False),
        ("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("B200", "NVIDIA B200", True),
        ("B200", "NVIDIA GB200", False),
    ],
)
def test_labels_and_names_of_accelerators(label: str, name: str, fits: bool) -> None:
    assert label_fits(label, name) is fits


def test_a_folder_that_is_not_the_shared_one_stops_a_run_and_a_slow_one_does_not() -> None:
    other = {**FACTS["store"], "is_shared": False}
    assert missing(store=other)["store"].is_needed
    slow = missing(store={**FACTS["store"], "write_gb_s": 0.01})["store"]
    assert (slow.is_needed, slow.fix) == (False, "use a faster file system, or weights.store")
    full = missing(store={**FACTS["store"], "free_gib": 0.5})["store"]
    assert full.is_needed


def test_a_clock_counts_only_beyond_what_the_measurement_can_tell() -> None:
    assert missing(skew_s=-1.4)["clock"].fix == "run a time service (NTP) on that machine"
    facts = judge(FACTS, wanted=REAL, asking=FACTS, is_asking=False, skew_s=1.4, skew_error_s=0.5)
    assert all(one.ok for one in facts if one.name == "clock")


def test_the_shortest_round_trip_says_how_far_a_clock_is_off() -> None:
    here = iter([0.0, 2.0, 10.0, 10.2, 20.0, 21.0, 30.0, 33.0, 40.0, 44.0])
    there = iter([1.0, 15.1, 25.0, 30.0, 40.0])
    skew_s, error_s = _skew(lambda: next(there), here_s=lambda: next(here))
    assert skew_s == pytest.approx(5.0)
    assert error_s == pytest.approx(0.1)


def test_a_driver_s_lines_become_accelerators() -> None:
    text = "NVIDIA H200, 143771, 570.86.10\nNVIDIA GB10, [N/A], 580.1\n\nno, devices\n"
    assert parse_gpus(text) == [
        {"name": "NVIDIA H200", "memory_mib": 143771, "driver": "570.86.10"},
        {"name": "NVIDIA GB10", "memory_mib": None, "driver": "580.1"},
    ]


def test_a_version_is_read_from_another_environment_without_running_it(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in ("sglang-0.5.23.dist-info", "sglang_router-0.3.2.dist-info"):
        (site / name).mkdir(parents=True)
    python = tmp_path / "bin" / "python"
    assert installed_version(python, "sglang") == "0.5.23"
    assert installed_version(python, "vllm") is None


def test_only_the_number_of_logins_is_told(tmp_path: Path) -> None:
    folder = tmp_path / ".docker"
    folder.mkdir()
    auths = {"one.example": {"auth": "dXNlcjpwYXNz"}, "two.example": {}}
    (folder / "config.json").write_text(json.dumps({"auths": auths}))
    facts = registry_facts({}, home=tmp_path)
    assert facts["logins"] == 2
    assert "dXNlcjpwYXNz" not in json.dumps(facts)
    assert registry_facts({}, home=tmp_path / "nobody")["logins"] == 0


def test_the_store_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    facts = store_facts(tmp_path / "runs", marker="")
    assert facts["error"] is None
    assert min(facts["write_gb_s"], facts["read_gb_s"]) > 0
    assert list(tmp_path.iterdir()) == []
    assert store_facts(tmp_path, marker="of-another-machine")["is_shared"] is False
    (tmp_path / "marker").touch()
    assert store_facts(tmp_path, marker="marker")["is_shared"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["marker"]
    assert STORE_BYTES == 32 * 2**20


def test_this_machine_has_an_answer_for_every_question(tmp_path: Path) -> None:
    ask = NodeAsk(store=str(tmp_path), sglang_python=None, sandbox="auto")
    facts = node_facts(ask)
    assert set(FACTS) <= set(facts)
    json.dumps(facts)
    found = judge(
        facts, wanted=Wanted(real_pools=False, sglang_version="0.5.23"), asking=facts,
        is_asking=True,
    )  # fmt: skip
    assert {one.name for one in found} >= {"python", "rlmix", "store", "sandbox", "hub", "registry"}
    assert all(isinstance(one, Finding) and (one.ok or one.fix) for one in found)
