"""The names that YAML values may have.

Rooms keep their own registries; a test holds these lists equal to them. They are repeated here
because a check must not import torch to know that `fp9` is not a format.
"""

FORMATS = ("bf16", "fp8", "nvfp4")
"""Weight formats, and the weight views of the same names."""
VIEW_SCOPES = ("all", "experts")
"""Which matrices a view quantises."""
ACTIVATION_FORMATS = ("bf16", "fp8", "nvfp4", "fp32")
KV_FORMATS = ("bf16", "fp8", "fp32")
ATTENTIONS = ("trtllm_mha", "fa3", "fa4", "flashinfer", "triton", "torch_native", "ascend")
EMBEDDED_ATTENTIONS = ("trtllm_mha", "fa3", "fa4", "flashinfer", "triton", "torch_native")
LINEAR_ATTENTIONS = ("none", "triton", "flashinfer", "ascend")
STATE_FORMATS = ("none", "fp32", "bf16", "fp16")
EMULATED = ("b300", "b200", "h200", "h100", "a100", "rtx_pro_6000")
"""Accelerators whose kernels the embedded engine stands in for."""
IMPORTANCE_KINDS = ("mis", "tis", "none", "ppo", "cispo", "gspo", "seq_tis")
CENTERED_KINDS = ("mis", "tis", "none", "cispo")
"""Kinds whose weight depends on the ratio alone, so that its expectation can be subtracted."""
SEQUENCE_MASKS = ("none", "product", "geometric", "k3", "opsm")
AVERAGES = ("tokens", "sequences")
BASELINES = ("mean", "leave_one_out")
SCALES = ("none", "std")
OPTIMIZERS = ("adamw", "sgd")
PACKINGS = ("rows", "documents")
ENGINES = ("embedded", "sglang", "sglang_external")
PREPARED_SOURCES = (
    *("harbor", "mimo", "nemotron", "r2e_gym", "swe_gym", "swe_rebench", "swe_smith"),
)
"""Public sets that are trained on from a folder that `rlmix tasks prepare` made."""
TASK_SOURCES = ("generated", *PREPARED_SOURCES)
BENCHMARKS = ("generated", "mini", "swe_bench", "swe_bench_pro", "swe_bench_pro_v2")
SANDBOX_BACKENDS = (
    *("auto", "namespaces", "weak", "docker", "podman", "apptainer", "remote", "unisolated"),
)
CONTAINER_BACKENDS = ("docker", "podman", "apptainer")
"""Those that start an image."""
BUNDLED_SOURCES = ("generated",)
"""Tasks whose code came with rlmix; weak isolation is enough for them."""
ROUTER_POLICIES = ("shortest_delay", "least_sessions")
ROUTER_SPEEDS = ("prior", "observed")
ROUTER_VIEWS = ("strict", "prefer")
ROUTER_PLACEMENTS = ("free", "pack", "spread")
PRICES = ("list", "market")
"""Which of the prices of accelerators a simulation counts with."""
PAUSE_MODES = ("in_place", "retract", "abort")
WEIGHT_TRANSPORTS = ("disk", "distributed")
LAUNCH_BACKENDS = ("local", "ray", "slurm", "kuberay")
CONSISTENCIES = ("native", "exact")

ALARMS = (
    "tail_ratio",
    "ess",
    "masked",
    "k3",
    "entropy",
    "non_finite",
    "pool_drift",
    "pool_masked",
    "pool_k3",
    "pool_tolerance",
)
POOL_ALARMS = ("pool_drift", "pool_masked", "pool_k3", "pool_tolerance")
"""Alarms about one pool: only they can quarantine."""
ALARM_ACTIONS = ("event", "quarantine", "stop")
LAST_POOL = ("continue", "stop")
