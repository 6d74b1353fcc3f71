"""What a replica asks of its machine, and how a refusal reads."""

from typing import Any

import pytest

from rlmix.launch.handle import Needs
from rlmix.launch.needs import (
    NODE_LABEL,
    TYPE_LABEL,
    NodeSeen,
    bundle_of,
    labels_without,
    needs_of,
    not_placed,
)


def needs(**changes: Any) -> Needs | None:
    asked: dict[str, Any] = {
        "engine": "sglang",
        "accelerator": "h100",
        "ray_label": "H100",
        "num_accelerators": 2,
        "is_cuda": True,
        "resources": {},
        "is_joined": True,
    }
    return needs_of(**{**asked, **changes})


def test_a_real_server_asks_for_its_accelerators_on_a_node_with_the_label() -> None:
    found = needs()
    assert found == Needs(kind="h100", gpus=2.0, resources={}, labels={TYPE_LABEL: "H100"})
    assert bundle_of(found, num_cpus=1.0) == {"CPU": 1.0, "GPU": 2.0}


def test_a_custom_resource_takes_the_place_of_the_label() -> None:
    found = needs(accelerator="a100", ray_label="A100-80G", resources={"a100": "a100_80g"})
    assert found == Needs(kind="a100", gpus=2.0, resources={"a100_80g": 2.0}, labels={})
    # An emulated pool has no GPU to ask for; the resource alone says where it may stand.
    found = needs(engine="embedded", resources={"h100": "spot"}, is_joined=False)
    assert found == Needs(kind="h100", gpus=0.0, resources={"spot": 2.0}, labels={})


def test_emulated_and_external_pools_and_a_ray_of_the_runs_own_ask_for_nothing() -> None:
    assert needs(engine="embedded") is None
    assert needs(engine="sglang_external", resources={"h100": "spot"}) is None
    assert needs(is_joined=False) is None
    assert needs(ray_label="none") is None


def test_accelerators_that_are_no_gpus_are_counted_under_their_own_name() -> None:
    found = needs(accelerator="ascend_910c", ray_label="Ascend910C", is_cuda=False)
    assert found is not None
    assert bundle_of(found, num_cpus=1.0) == {"CPU": 1.0, "NPU": 2.0}


@pytest.mark.parametrize("labels", [{TYPE_LABEL: "H100"}, {}])
def test_a_refusal_says_what_was_asked_for_and_what_there_is(labels: dict[str, str]) -> None:
    nodes = [
        NodeSeen(
            total={"CPU": 8, "GPU": 8}, free={"CPU": 3, "GPU": 1}, labels={TYPE_LABEL: "H100"}
        ),
        NodeSeen(
            total={"CPU": 8, "GPU": 4}, free={"CPU": 8, "GPU": 4}, labels={TYPE_LABEL: "A100"}
        ),
    ]
    asked = Needs(kind="h100", gpus=2.0, resources={}, labels=labels)
    sentence = not_placed("replica-h100-4-1", asked, nodes, num_cpus=1.0, limit_s=600.0)
    assert "no machine for replica-h100-4-1 (h100) after 600 s" in sentence
    assert "asked for 1 CPU and 2 GPU" in sentence
    if labels:
        assert f"on a node with {TYPE_LABEL}=H100; 1 of 2 nodes are such" in sentence
        assert "8 GPU of which 1 are free" in sentence
    else:
        assert "2 of 2 nodes are such" in sentence
        assert "12 GPU of which 5 are free" in sentence
    assert "launch.place_timeout_s" in sentence


def test_machines_that_leave_are_kept_out_by_their_id_beside_the_label() -> None:
    assert labels_without({TYPE_LABEL: "H100"}, []) == {TYPE_LABEL: "H100"}
    assert labels_without({TYPE_LABEL: "H100"}, {"b2", "a1"}) == {
        TYPE_LABEL: "H100", NODE_LABEL: "!in(a1, b2)",
    }  # fmt: skip
