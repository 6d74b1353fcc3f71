"""Composition through the real Hydra: what is accepted, and every fault told in one go."""

from pathlib import Path

import pytest

from rlmix.config.compose import load_config
from rlmix.config.places import conf_dir
from rlmix.core.errors import ConfigError

EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
ALGORITHMS = sorted(path.stem for path in (conf_dir() / "algo").glob("*.yaml"))


def faults(*overrides: str, extra_dir: Path | None = None) -> list[str]:
    """The lines of the error that these arguments provoke."""
    with pytest.raises(ConfigError) as caught:
        load_config("train", overrides, extra_dir=extra_dir)
    lines = str(caught.value).splitlines()
    return [line.strip() for line in (lines[1:] if len(lines) > 1 else lines)]


def test_default_run_has_six_pools_each_in_the_format_of_its_chip() -> None:
    config = load_config().config
    formats = {name: (pool.weights, pool.kv) for name, pool in config.pools.items()}
    assert formats == {
        "b300": ("nvfp4", "fp8"),
        "b200": ("nvfp4", "fp8"),
        "h200": ("fp8", "fp8"),
        "h100": ("fp8", "fp8"),
        "a100": ("bf16", "fp8"),
        "rtx_pro_6000": ("bf16", "fp8"),
    }
    assert all(name == pool.accelerator for name, pool in config.pools.items())
    assert [pool.replicas for pool in config.pools.values()] == [1] * 6


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_passes_the_checks(name: str) -> None:
    loaded = load_config("train", [f"experiment={name}"])
    assert loaded.choices["experiment"] == name


@pytest.mark.parametrize(
    "choice",
    [f"algo={name}" for name in ALGORITHMS]
    + ["pools=two", "pools=six", "pool@pools.h100=embedded_a100"],
)
def test_every_shipped_choice_composes_and_passes_the_checks(choice: str) -> None:
    group, file = choice.split("=")
    assert load_config("train", [choice]).choices[group] == file


def test_the_arms_of_a_comparison_differ_in_what_their_names_say() -> None:
    arms = {name: load_config("train", [f"algo={name}"]).config.algo for name in ALGORITHMS}
    corrections = {name: (arm.importance, arm.centering) for name, arm in arms.items()}
    assert corrections == {
        "grpo": ("none", False),
        "grpo_topp": ("none", False),
        "tis": ("tis", False),
        "mis": ("mis", False),
        "sc": ("none", True),
        "mis_sc": ("mis", True),
        "mis_sc_full": ("mis", True),
        "ppo": ("ppo", False),
        "cispo": ("cispo", False),
        "gspo": ("gspo", False),
        "seq_mis": ("seq_tis", False),
    }
    truncating = {name for name, arm in arms.items() if arm.top_p < 1 or arm.top_k > 0}
    assert truncating == {name for name, arm in arms.items() if arm.replay}
    assert truncating == {"grpo_topp", "mis_sc"}
    assert {(arm.scale, arm.baseline) for arm in arms.values()} == {("none", "mean")}
    assert (arms["tis"].high, arms["mis"].low, arms["mis"].high) == (2.0, 0.5, 5.0)


def test_arguments_beat_the_experiment_and_the_experiment_beats_the_defaults() -> None:
    default = load_config().config.loop
    tiny = load_config("train", ["experiment=tiny"]).config.loop
    loop = load_config("train", ["loop.steps=7", "experiment=tiny"]).config.loop
    assert loop.steps == 7 != tiny.steps
    assert loop.sessions_per_step == tiny.sessions_per_step != default.sessions_per_step
    assert loop.max_staleness == tiny.max_staleness == default.max_staleness


def test_a_pool_is_added_swapped_and_removed_by_name() -> None:
    config = load_config(
        "train",
        [
            "+pool@pools.spare=embedded_b300",
            "pools.spare.replicas=3",
            "pool@pools.h100=embedded_a100",
            "~pools.a100",
        ],
    ).config
    assert (config.pools["spare"].weights, config.pools["spare"].replicas) == ("nvfp4", 3)
    assert config.pools["h100"].weights == "bf16"
    assert "a100" not in config.pools


def test_the_documented_request_names_both_faults_what_is_allowed_and_the_likely_key() -> None:
    key, value = faults("pools.h100.weights=fp9", "loop.stepz=3")
    assert key.startswith("loop.stepz=3: no such key; loop has steps, sessions_per_step")
    assert key.endswith("did you mean loop.steps?")
    assert value == (
        "pools.h100.weights: got 'fp9'; use one of bf16, fp8, nvfp4; did you mean fp8?"
    )


def test_faults_of_every_kind_are_told_together() -> None:
    lines = faults(
        "loop.steps=abc",
        "trainer.lr=fast",
        "algo=grpp",
        "pools.h1000.weights=fp8",
        "pools.h100.replicas=-1",
        "loop.sessions_per_step=30",
        "loop.group_size=8",
        "run.seed",
    )
    assert [line.split(":")[0] for line in lines] == [
        "algo=grpp",
        "run.seed",
        "loop.steps",
        "trainer.lr",
        "pools.h1000.weights=fp8",
        "pools.h100.replicas",
        "loop.sessions_per_step",
    ]
    assert lines[2] == "loop.steps: got 'abc'; use a whole number"
    assert lines[3] == "trainer.lr: got 'fast'; use a number"


@pytest.mark.parametrize("text", ["+loop.stepz=3", "++loop.stepz=3", "loop.stepz=3"])
def test_an_unknown_key_is_refused_with_or_without_plus(text: str) -> None:
    (line,) = faults(text)
    assert line.startswith(f"{text}: no such key")
    assert line.endswith("did you mean loop.steps?")


@pytest.mark.parametrize(
    ("text", "likely"),
    [
        ("steps=4", "loop.steps"),
        ("alg.top_p=1", "algo.top_p"),
        ("pools.h100.weight=fp8", "pools.h100.weights"),
        ("trainer.learning_rate=1", "trainer.lr"),
        ("loop.lr=1", "trainer.lr"),
        ("usd_per_hour=1", "pools.NAME.usd_per_hour"),
        ("experimant=tiny", "experiment"),
    ],
)
def test_the_likely_key_is_found_among_siblings_and_in_other_sections(
    text: str, likely: str
) -> None:
    (line,) = faults(text)
    assert line.endswith(f"did you mean {likely}?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hydra.job.chdir=true", "composes without a Hydra application"),
        ("hydra/launcher=basic", "composes without a Hydra application"),
        ("run.seed=1,2", "one run at a time"),
        ("loop.steps", "write KEY=VALUE"),
        ("run.name=a=b", "quote the value once more"),
        ("loop={steps: 3}", "loop is a section, not a value"),
        (
            "pools={}",
            "is chosen by the name of a file; files: b200_bf16, b200_nvfp4, qwen36_mixed, "
            "sglang_and_nvfp4, six, six_bf16, two",
        ),
        (
            "pools=[two]",
            "is chosen by the name of a file; files: b200_bf16, b200_nvfp4, qwen36_mixed, "
            "sglang_and_nvfp4, six, six_bf16, two",
        ),
        (
            "experiment=tinny",
            "no file 'tinny' in group experiment; files: exact, qwen36_b200, qwen36_b200_nvfp4, "
            "qwen36_mixed, study/bf16, study/mixed, tiny, tiny_sglang; did you mean tiny?",
        ),
        ("experiment=null", "leave this argument out"),
        ("polls@pools.x=embedded_bf16", "no group 'polls'"),
        ("pool=embedded_h100", "write pool@pools.NAME=embedded_h100"),
        ("~loop.steps", "only entries of pools, accelerators and engine_args can be removed"),
        ("~pools.h1", "pools has no 'h1'"),
        ("+loop.steps=3", "leave the + out: loop.steps=3"),
        ("+pools.h100.tp=1", "leave the + out: pools.h100.tp=1"),
        ("+pools.new.weights=fp8", "add a pool with +pool@pools.new=embedded_h100"),
        ("+accelerators.new.memory_gb=8", "add an accelerator in a YAML file"),
        ("+inventory.nodes.a100.count=1", "inventory=FILE --conf-dir DIR"),
        ("pools.h100.engine_args.page=1", "add it with +pools.h100.engine_args.page=1"),
        ("loop.steps.now=3", "loop.steps is a single value"),
        ("run.name=${oc.env:RLMIX_TEST_NO_SUCH_VARIABLE}", "RLMIX_TEST_NO_SUCH_VARIABLE"),
    ],
)
def test_a_malformed_or_impossible_argument_is_told_with_its_remedy(text: str, said: str) -> None:
    (line,) = faults(text)
    assert line.startswith(f"{text}: ")
    assert said in line


def test_a_value_may_refer_to_another_key() -> None:
    config = load_config("train", ["loop.steps=9", "loop.checkpoint_every=${loop.steps}"]).config
    assert config.loop.checkpoint_every == 9


def test_values_that_nothing_sets_are_named_one_by_one() -> None:
    lines = faults("+pool@pools.spare=embedded")
    assert lines == [
        f"pools.spare.{key}: no value; add pools.spare.{key}=VALUE, or set it in YAML"
        for key in ("accelerator", "attention", "moe")
    ]


def test_folder_of_own_yaml_adds_accelerators_and_experiments(tmp_path: Path) -> None:
    (tmp_path / "accelerators").mkdir()
    (tmp_path / "accelerators" / "mine.yaml").write_text(
        "defaults: [public, _self_]\n"
        "l40s: {memory_gb: 48, bandwidth_tb_s: 0.86, bf16_tflops: 362, fp8_tflops: 733,\n"
        "  nvfp4_tflops: null, compute_capability: '8.9', link: PCIe 4, ray_label: L40S,\n"
        "  usd_per_hour: 1, price_source: mine}\n"
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "cheap.yaml").write_text(
        "# @package _global_\ndefaults: [override /accelerators: mine]\nloop: {steps: 2}\n"
    )
    loaded = load_config("train", ["experiment=cheap"], extra_dir=tmp_path)
    assert loaded.config.accelerators["l40s"].memory_gb == 48
    assert loaded.config.loop.steps == 2
    assert "h100" in loaded.config.accelerators


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("loop: {stepz: 3}", "experiment=own: loop.stepz: no such key; loop has steps"),
        ("loop: {steps: abc}", "experiment=own: loop.steps: Value 'abc'"),
    ],
)
def test_a_fault_in_own_yaml_names_the_key(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(f"# @package _global_\n{body}\n")
    (line,) = faults("experiment=own", extra_dir=tmp_path)
    assert line.startswith(said)


def test_missing_folder_of_own_yaml_is_an_error_not_a_warning(tmp_path: Path) -> None:
    (line,) = faults(extra_dir=tmp_path / "nowhere")
    assert "no such folder" in line


def test_composing_twice_in_one_process_gives_equal_configurations() -> None:
    overrides = ["loop.steps=5", "pools.h100.weights=bf16"]
    assert load_config("train", overrides) == load_config("train", overrides)
