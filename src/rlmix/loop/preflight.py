"""What a run of real servers needs on this machine, looked for before anything starts.

A plan can be made anywhere; starting it wants SGLang, accelerators, and a pool that can evaluate.
Invariant: everything that is missing is told at once, each with what to do.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError, DataError
from rlmix.engine.sglang.arguments import refused_arguments
from rlmix.engine.sglang.environment import is_being_made, is_runnable, sglang_python
from rlmix.launch.reach import unreachable
from rlmix.loop.fleets import NO_EVALUATION, evaluating_pool
from rlmix.plan.capabilities import SGLANG_VERSION
from rlmix.plan.runplan import RunPlan
from rlmix.tasks.source import open_source

DEVICES = Path("/dev")
MARKS = {
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "kuberay": ("KUBERNETES_SERVICE_HOST",),
}
"""Launch target -> variables of which a process inside it has one."""
PLACES = {"slurm": "in no SLURM job", "kuberay": "in no pod"}
ANSWERS = Path("~/.cache/rlmix/sglang-arguments")
"""Where the answers of SGLang's parser are kept."""


def interpreter(config: TrainConfig) -> str:
    """Python of real servers, whether or not it is there."""
    named = config.sglang.python
    return str(sglang_python(named, version=SGLANG_VERSION, environ=os.environ))


def argument_faults(plan: RunPlan, config: TrainConfig, *, cache: Path = ANSWERS) -> list[str]:
    """What SGLang itself says against further arguments, where it is installed; one line each.
    Arguments of rlmix's own profiles are not asked about: tests hold them against the parser."""
    argvs = {
        name: pool.argv
        for name, pool in plan.pools.items()
        if pool.engine == "sglang" and config.pools[name].engine_args
    }
    python = Path(interpreter(config))
    if not argvs or not is_runnable(python) or is_being_made(python):
        return []
    refused = refused_arguments(argvs, cache=cache.expanduser(), environ=os.environ)
    return [
        f"pools.{name}.engine_args: SGLang {SGLANG_VERSION} refuses its arguments: {why}; change "
        "or remove what it names"
        for name, why in refused.items()
    ]


def task_faults(config: TrainConfig) -> Iterator[str]:
    """What is wrong with the tasks: a folder that holds no prepared set, or too few tasks."""
    tasks = config.tasks
    for split, limit, needed in (
        ("train", tasks.limit, 1),
        ("eval", config.loop.eval_tasks, config.loop.eval_tasks),
    ):
        if not needed:
            continue
        try:
            source = open_source(
                tasks.source, split=split, seed=tasks.seed, limit=limit, path=tasks.path
            )
        except (ConfigError, DataError) as error:
            yield str(error)
            return
        count = len(source.task_ids())
        if count < needed and split == "train":
            yield f"tasks.path={tasks.path}: no task of the set may be trained on; check it again"
        elif count < needed:
            yield (
                f"loop.eval_tasks={needed}: {tasks.path} holds out {count} tasks; allowed: at most "
                f"{count}"
            )


def launch_faults(config: TrainConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Why this is not the place where such a cluster is joined."""
    backend = config.launch.backend
    if backend in MARKS and not any(name in environ for name in MARKS[backend]):
        yield (
            f"launch={backend}: none of {', '.join(MARKS[backend])} is set, so this process is "
            f"{PLACES[backend]}; start it there as docs/cluster.md says, or take launch=ray"
        )
    elif config.launch.address and (why := unreachable(config.launch.address, environ)):
        yield why


def start_faults(plan: RunPlan, config: TrainConfig, *, devices: Path = DEVICES) -> list[str]:
    """Why this plan cannot be started here, one line each."""
    faults = [*launch_faults(config, os.environ), *task_faults(config)]
    is_joined = config.launch.address is not None
    # In a cluster they start on other machines, each of which says what it lacks: `rlmix doctor`.
    started = {
        name: pool for name, pool in plan.pools.items() if pool.engine == "sglang" and not is_joined
    }
    python = Path(interpreter(config))
    if started and is_runnable(python) and is_being_made(python):
        faults.append(
            f"pools.{next(iter(started))}.engine=sglang: the environment of {python} is not "
            "finished; run scripts/sglang-env, which waits for it or makes it again"
        )
    elif started and not is_runnable(python):
        faults.append(
            f"pools.{next(iter(started))}.engine=sglang: no SGLang is installed at {python}; run "
            "scripts/sglang-env, which makes that environment, or set sglang.python to an "
            f"interpreter that has sglang {SGLANG_VERSION}"
        )
    wanted = {
        name: max(max(ids) for ids in pool.gpu_ids) + 1
        for name, pool in started.items()
        if pool.gpu_ids
    }
    found = len(list(devices.glob("nvidia[0-9]*")))
    trainer = config.trainer
    if trainer.device != "cpu" and trainer.ranks > found and not is_joined:
        faults.append(
            f"trainer.device={trainer.device}: this machine has {found} accelerators, and each of "
            f"trainer.ranks={trainer.ranks} needs one; lower trainer.ranks, or set "
            "trainer.device=cpu"
        )
    for name, count in wanted.items():
        if count > found:
            faults.append(
                f"pools.{name}.accelerator={plan.pools[name].accelerator}: this machine has "
                f"{found} accelerators, and the last replica stands on number {count}; lower "
                f"pools.{name}.replicas, or take engine=embedded"
            )
    if config.loop.eval_tasks and evaluating_pool(plan) is None:
        faults.append(NO_EVALUATION)
    return faults + list(evaluation_faults(plan, config))


def evaluation_faults(plan: RunPlan, config: TrainConfig) -> Iterator[str]:
    """What is wrong with evaluations during the run."""
    asked = config.eval
    if not asked.every_steps:
        return
    pool = evaluating_pool(plan)
    if pool is None:
        yield NO_EVALUATION.replace("loop.eval_tasks", "eval.every_steps")
    elif pool.engine != "embedded" and pool.gpu_ids:
        yield (
            f"eval.every_steps={asked.every_steps}: every accelerator of the plan serves sessions "
            "of the run, and an evaluation beside it needs some of its own; set "
            "eval.every_steps=0, and judge checkpoints on another machine with `rlmix eval "
            "swe-bench-pro agent=policy eval.checkpoint=RUN:STEP`"
        )
    from rlmix.evals.run import refuse_unrunnable
    from rlmix.tasks.benchmark import GENERATED, open_benchmark

    try:
        refuse_unrunnable(
            open_benchmark(
                asked.data or GENERATED,
                subset="all" if asked.subset == "all+hard" else asked.subset,
                path=asked.path,
                limit=asked.limit,
                seed=config.tasks.seed,
            )
        )
    except (ConfigError, DataError) as error:
        yield str(error)
