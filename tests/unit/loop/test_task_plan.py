"""The plan's tasks from a set on disk, and what an engine's client says."""

from pathlib import Path

import pytest

from rlmix.config.compose import load_config
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError
from rlmix.loop.task_plan import tasks_plan
from rlmix.tasks.prepare.set import prepare_set
from tests.unit.tasks.test_gates import make_set


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data, images, out = make_set(tmp_path_factory.mktemp("set"))
    prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    return out


def config(*overrides: str) -> TrainConfig:
    return load_config("train", ["experiment=tiny", *overrides]).config


def test_a_prepared_set_is_planned_from_its_files(prepared: Path) -> None:
    found = tasks_plan(config("tasks.source=swe_rebench", f"tasks.path={prepared}"))
    assert found is not None
    assert (found.train, found.held_out, found.excluded, found.unchecked) == (1, 0, 2, 1)
    assert found.images == ("hub/pack:1",)
    assert 0 < found.disk_gib["prepared"] < 0.01
    assert found.refusals == ()
    assert any("2 tasks are not prepared, e.g. data.jsonl:2" in one for one in found.missing)


def test_generated_tasks_need_nothing() -> None:
    assert tasks_plan(config()) is None


def test_a_folder_without_a_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prepared set there; make one with"):
        tasks_plan(config("tasks.source=swe_rebench", f"tasks.path={tmp_path}"))


def test_an_engine_is_asked_which_images_it_has(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "podman"
    client.write_text('#!/bin/sh\n[ "$1 $2" = "image ls" ] && echo docker.io/hub/pack:1\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/local/bin:/usr/bin:/bin")
    asked = ("tasks.source=swe_rebench", f"tasks.path={prepared}", "sandbox.backend=podman")
    found = tasks_plan(config(*asked))
    assert found is not None
    assert found.refusals == ()
    client.write_text("#!/bin/sh\necho other:1\n")
    found = tasks_plan(config(*asked))
    assert found is not None
    # Its image has no programs here, but an engine would start it by its name.
    assert found.refusals == (
        "images that podman does not have: hub/pack:1; get them with `rlmix tasks pull` and the "
        "same keys",
    )
