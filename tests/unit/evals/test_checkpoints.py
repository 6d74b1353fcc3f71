"""Policies as versions that engines load."""

from pathlib import Path

from rlmix.evals.checkpoints import choose_policy, publish_policy
from rlmix.observe.run_dir import RunDir
from rlmix.weights.store import verify_version, version_dir


def test_a_model_and_a_version_of_a_run_become_verified_versions(tmp_path: Path) -> None:
    model = choose_policy(tmp_path, None, model_path="bundled:tiny", is_model_given=True)
    publish_policy(model, tmp_path / "a")
    folder = version_dir(tmp_path / "a", "bf16", 0)
    manifest = verify_version(folder)
    assert (manifest.view, manifest.version) == ("bf16", 0)
    publish_policy(model, tmp_path / "a")  # Asked again after a kill: the same bytes.

    with RunDir.create(tmp_path, "r") as run:
        kept = version_dir(run.path / "evaluation", "bf16", 0)
        kept.parent.mkdir(parents=True)
        folder.rename(kept)
        again = choose_policy(tmp_path, "r:0", model_path="bundled:tiny", is_model_given=False)
        assert again.folder == kept
        publish_policy(again, tmp_path / "b")
    linked = version_dir(tmp_path / "b", "bf16", 0)
    assert verify_version(linked).content == manifest.content
    # Nothing was read or written: the files have a second name.
    name = "model.safetensors"
    assert (linked / name).stat().st_ino == (kept / name).stat().st_ino
