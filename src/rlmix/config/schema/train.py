"""The root of `conf/train.yaml`."""

from dataclasses import dataclass, field

from rlmix.config.schema.alarms import AlarmsConfig
from rlmix.config.schema.diff import DiffConfig
from rlmix.config.schema.learning import (
    AlgoConfig,
    LoopConfig,
    NumericsConfig,
    TrainerConfig,
    WeightsConfig,
)
from rlmix.config.schema.pools import (
    AcceleratorConfig,
    InventoryConfig,
    PlanConfig,
    PoolConfig,
)
from rlmix.config.schema.run import (
    LaunchConfig,
    ModelConfig,
    NetConfig,
    ObserveConfig,
    RouterConfig,
    RunConfig,
    SglangConfig,
)
from rlmix.config.schema.scaling import ScalingConfig
from rlmix.config.schema.sessions import EvalConfig, SandboxConfig, SessionConfig, TasksConfig


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    run: RunConfig
    model: ModelConfig
    tasks: TasksConfig
    sandbox: SandboxConfig
    session: SessionConfig
    algo: AlgoConfig
    loop: LoopConfig
    trainer: TrainerConfig
    weights: WeightsConfig
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    accelerators: dict[str, AcceleratorConfig] = field(default_factory=dict)
    inventory: InventoryConfig
    plan: PlanConfig
    router: RouterConfig
    scaling: ScalingConfig
    numerics: NumericsConfig
    net: NetConfig
    sglang: SglangConfig
    launch: LaunchConfig
    alarms: AlarmsConfig
    observe: ObserveConfig
    eval: EvalConfig
    diff: DiffConfig
