"""What `bench_router.py` measures: fleets of timed replicas, and routers as processes."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.engine.timed.fleet import write_specs
from rlmix.engine.timed.player import OneUrl, Target
from rlmix.engine.timed.replica import ReplicaSpec
from rlmix.engine.timed.steps import StepTimes
from rlmix.plan.accelerators import peak_tflops
from rlmix.plan.memory import kv_bytes_held, memory_budget
from rlmix.plan.model_facts import REFERENCE, bundled_facts
from rlmix.plan.speed import BANDWIDTH_REACHED_FRAC, FLOPS_REACHED_FRAC, Numbers

REPOSITORY = Path(__file__).parents[1]
LAUNCH_S = 0.003
"""Of every decoding step besides moving bytes: launches, sampling, the scheduler. A guess."""
PREFILL_FIXED_S = 0.010
"""Of every prefill, likewise."""
THINNING = 4
"""One request here stands for so many of an accelerator's: a step does the work of all of them.
Places and cache shrink by as much, and so does what this machine has to carry for the same load."""
REFERENCE_CONTEXT_TOKENS = 20_000
"""Context at which speeds are compared; about the mean of the trace."""
BALANCE_ABS_THRESHOLD = 64
"""Of sglang-router's cache_aware, in requests; its default, which is thinned as well."""
START_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A replica of the reference run's fleet: formats, size, requests at a time."""

    accelerator: str
    weights: str
    activations: str
    kv: str
    state: str
    tp: int
    max_running: int


SIX = (
    Chip(accelerator="b300", weights="nvfp4:experts", activations="nvfp4", kv="fp8", state="bf16",
         tp=1, max_running=64),
    Chip(accelerator="b200", weights="nvfp4:experts", activations="nvfp4", kv="fp8", state="bf16",
         tp=1, max_running=32),
    Chip(accelerator="h200", weights="fp8", activations="fp8", kv="fp8", state="fp32",
         tp=1, max_running=32),
    Chip(accelerator="h100", weights="fp8", activations="fp8", kv="fp8", state="fp32",
         tp=1, max_running=24),
    Chip(accelerator="a100", weights="bf16", activations="bf16", kv="bf16", state="fp32",
         tp=2, max_running=16),
    Chip(accelerator="rtx_pro_6000", weights="bf16", activations="bf16", kv="bf16", state="fp32",
         tp=2, max_running=16),
)  # fmt: skip
"""One replica of each; requests at a time as a published mixed run had them."""


def chips() -> dict[str, AcceleratorConfig]:
    text = (REPOSITORY / "conf" / "accelerators" / "public.yaml").read_text()
    return {name: AcceleratorConfig(**fields) for name, fields in yaml.safe_load(text).items()}


def step_times(chip: AcceleratorConfig, numbers: Numbers, *, tp: int) -> StepTimes:
    """The roofline of `rlmix.plan.speed`, taken apart, for THINNING requests in step; memory
    decides at these batches."""
    facts = bundled_facts(REFERENCE)
    moves = BANDWIDTH_REACHED_FRAC * tp * chip.bandwidth_tb_s * 1e12
    multiplies = FLOPS_REACHED_FRAC * tp * peak_tflops(chip, numbers.activations) * 1e12
    attends = FLOPS_REACHED_FRAC * tp * chip.bf16_tflops * 1e12
    expert_bytes = facts.expert_layers * facts.experts * facts.expert_bytes(numbers.weights)
    return StepTimes(
        fixed_s=LAUNCH_S + facts.dense_bytes(numbers.weights) / moves,
        experts_s=expert_bytes / moves,
        expert_missed_frac=(1.0 - facts.experts_per_token / facts.experts) ** THINNING,
        request_s=THINNING * 2 * facts.state_bytes(numbers.state) / moves,
        kv_token_s=THINNING * kv_bytes_held(facts, kv=numbers.kv, tp=tp) / moves,
        prefill_fixed_s=PREFILL_FIXED_S,
        prefill_token_s=THINNING * 2 * facts.active_params / multiplies,
        prefill_pair_s=THINNING * facts.attention_flops / attends,
    )


def plan_specs(*, time_scale: float) -> list[tuple[ReplicaSpec, float]]:
    """The six accelerators: (replica, dollars an hour)."""
    known, facts = chips(), bundled_facts(REFERENCE)
    specs = []
    for chip in SIX:
        found = known[chip.accelerator]
        numbers = Numbers(
            weights=chip.weights, activations=chip.activations, kv=chip.kv, state=chip.state
        )
        budget = memory_budget(
            facts, found, weights=chip.weights, kv=chip.kv, state=chip.state, tp=chip.tp,
            memory_frac=0.85, max_running=chip.max_running,
        )  # fmt: skip
        spec = ReplicaSpec(
            name=chip.accelerator,
            accelerator=chip.accelerator,
            steps=step_times(found, numbers, tp=chip.tp),
            max_running=chip.max_running // THINNING,
            kv_tokens=budget.kv_tokens // THINNING,
            time_scale=time_scale,
        )
        specs.append((spec, chip.tp * (found.usd_per_hour or 0.0)))
    return specs


def ratio_specs(*, time_scale: float) -> list[tuple[ReplicaSpec, float]]:
    """Three replicas whose speeds are 4 : 2 : 1 and that differ in nothing else."""
    [(slow, _)] = [entry for entry in plan_specs(time_scale=time_scale) if entry[0].name == "a100"]
    return [
        (
            ReplicaSpec(
                name=f"x{factor}",
                accelerator=f"x{factor}",
                steps=slow.steps.scaled(1 / factor),
                max_running=16,
                kv_tokens=slow.kv_tokens * THINNING,
                time_scale=time_scale,
            ),
            1.0 * factor,
        )
        for factor in (4, 2, 1)
    ]


def speed_of(spec: ReplicaSpec) -> float:
    """Tokens a second with every place taken: what a plan would tell the router beforehand."""
    batch = spec.max_running
    return batch / spec.steps.decode_s(batch, batch * REFERENCE_CONTEXT_TOKENS)


class Fleet:
    """Timed replicas as one process."""

    def __init__(self, specs: Sequence[tuple[ReplicaSpec, float]], folder: Path) -> None:
        self.specs = [spec for spec, _ in specs]
        self.time_scale = specs[0][0].time_scale
        self.usd_per_hour = sum(price for _, price in specs)
        self.folder = folder
        self.urls: dict[str, str] = {}
        self.control = ""

    @property
    def speeds(self) -> dict[str, float]:
        return {spec.name: speed_of(spec) for spec in self.specs}

    async def __aenter__(self) -> "Fleet":
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "fleet.json"
        path.write_text(json.dumps(write_specs(self.specs)))
        ready = self.folder / "fleet.ready"
        ready.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "rlmix.engine.timed", "--fleet", str(path),
                "--ready-file", str(ready), "--parent-pid", str(os.getpid())]  # fmt: skip
        self._process = start_process(argv, self.folder / "fleet.log")
        document = json.loads(await wait_for_file(ready, self._process))
        self.urls, self.control = document["replicas"], document["control"]
        return self

    async def __aexit__(self, *_: object) -> None:
        end_process(self._process)

    async def order(self, name: str, **fault: Any) -> int:
        """Break a replica; how many requests under way that hit."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.control}/fleet/{name}", json=fault) as response,
        ):
            return int((await response.json(content_type=None))["in_flight"])

    async def describe(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.control}/fleet") as response:
            return dict(await response.json(content_type=None))

    async def reset(self) -> None:
        """Cold caches, nothing broken."""
        for name in self.urls:
            await self.order(name, fault="restart")

    def cpu_s(self) -> float:
        return cpu_seconds(self._process.pid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A router, or a way to do without one."""

    name: str
    version: str
    argv: Callable[[Fleet, int, Path], list[str]] | None = None
    """Command line for a port; None for no router."""
    target: Callable[[Fleet], Target] | None = None
    """For those without a router."""
    health: str = "/ping"
    releases: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    target: Target
    cpu_s: Callable[[], float]
    pid: int | None = None


@dataclass(slots=True)
class StickyOracle:
    """Sessions stay on the replica that had the fewest sessions per speed when they came."""

    urls: dict[str, str]
    speeds: dict[str, float]
    homes: dict[str, str] = field(default_factory=dict)

    def url_of(self, session_id: str) -> str:
        home = self.homes.get(session_id)
        if home is None:
            held = dict.fromkeys(self.urls, 0)
            for name in self.homes.values():
                held[name] += 1
            home = min(held, key=lambda name: (held[name] + 1) / self.speeds[name])
            self.homes[session_id] = home
        return self.urls[home]

    def ended(self, session_id: str) -> None:
        self.homes.pop(session_id, None)


@dataclass(slots=True)
class RoundRobin:
    """Turn after turn to the next replica."""

    urls: Sequence[str]
    next_index: "itertools.count[int]" = field(default_factory=itertools.count)

    def url_of(self, session_id: str) -> str:
        del session_id
        return self.urls[next(self.next_index) % len(self.urls)]

    def ended(self, session_id: str) -> None:
        del session_id


def our_argv(fleet: Fleet, port: int, folder: Path) -> list[str]:
    del folder
    argv = [sys.executable, "-m", "rlmix.router", "--port", str(port)]
    for name, url in fleet.urls.items():
        argv += ["--replica", f"{name}={url}", "--speed", f"{name}={fleet.speeds[name]:.3f}"]
    return argv


def sglang_argv(
    python: str, module: str, policy: str, fleet: Fleet, port: int, folder: Path, *more: str
) -> list[str]:
    return [
        python, "-m", module, "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1", "--log-level", "warn", "--log-dir", str(folder),
        "--policy", policy, *more, "--worker-urls", *fleet.urls.values(),
    ]  # fmt: skip


def available_contestants(python: str | None, *, only: Sequence[str] | None) -> list[Contestant]:
    """Ours, the oracle, and everybody who is installed."""
    found = [
        Contestant(name="ours", version=version_in(sys.executable, "rlmix") or "",
                   argv=our_argv, releases=True),
        Contestant(name="oracle", version="", target=lambda f: StickyOracle(f.urls, f.speeds)),
        Contestant(name="round_robin_direct", version="",
                   target=lambda f: RoundRobin(list(f.urls.values()))),
    ]  # fmt: skip
    python = python or sys.executable
    for package, module, policies in (
        ("sglang-router", "sglang_router.launch_router",
         ("cache_aware", "power_of_two", "round_robin", "manual")),
        ("smg", "smg.launch_router", ("cache_aware", "least_load")),
    ):  # fmt: skip
        version = version_in(python, package)
        if version is None:
            print(f"{package} is not installed for {python}: not measured", file=sys.stderr)
            continue
        for policy in policies:
            more: tuple[str, ...] = ()
            if policy == "manual":
                more = ("--assignment-mode", "min_load")
            elif policy == "cache_aware" and package == "sglang-router":
                more = ("--balance-abs-threshold", str(BALANCE_ABS_THRESHOLD // THINNING))
            if package == "smg":
                more = ("--sticky-sessions", "--load-monitor-interval", "1")
            argv = functools.partial(_rival_argv, python, module, policy, more)
            name = f"{package.replace('-', '_')}_{policy}"
            found.append(Contestant(name=name, version=version, argv=argv, health="/health"))
    if only is not None:
        found = [c for c in found if c.name in ("ours", "oracle") or c.name in only]
    return found


def _rival_argv(
    python: str, module: str, policy: str, more: tuple[str, ...], fleet: Fleet, port: int,
    folder: Path,
) -> list[str]:  # fmt: skip
    return sglang_argv(python, module, policy, fleet, port, folder, *more)


def version_in(python: str, package: str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@contextlib.asynccontextmanager
async def start_contestant(contestant: Contestant, fleet: Fleet) -> AsyncIterator[Running]:
    """The router, serving and knowing every replica."""
    if contestant.argv is None:
        assert contestant.target is not None
        yield Running(target=contestant.target(fleet), cpu_s=lambda: 0.0)
        return
    port = free_port()
    folder = fleet.folder / contestant.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = start_process(contestant.argv(fleet, port, folder), folder / "log")
    try:
        url = f"http://127.0.0.1:{port}"
        await wait_for_url(url + contestant.health, process)
        await wait_for_workers(contestant, fleet, url, process)
        yield Running(
            target=OneUrl(url, releases=contestant.releases),
            cpu_s=functools.partial(cpu_seconds, process.pid),
            pid=process.pid,
        )
    finally:
        end_process(process)


async def wait_for_workers(
    contestant: Contestant, fleet: Fleet, url: str, process: "subprocess.Popen[bytes]"
) -> None:
    """Until the router lists every replica as ready."""

    async def all_there(http: aiohttp.ClientSession) -> bool:
        if contestant.name == "ours":
            async with http.get(url + "/replicas") as response:
                replicas = (await response.json(content_type=None))["replicas"]
            ready = [r for r in replicas if r["state"] in ("ready", "healthy")]
            return len(ready) == len(fleet.urls)
        async with http.get(url + "/workers") as response:
            workers = (await response.json(content_type=None)).get("workers", [])
        return sum(bool(worker.get("is_healthy")) for worker in workers) == len(fleet.urls)

    async with aiohttp.ClientSession() as http:
        deadline_s = time.monotonic() + START_S
        while not await all_there(http):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise TimeoutError(f"{contestant.name} did not list all replicas as ready")
            await asyncio.sleep(0.05)


def start_process(argv: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(argv, stdout=file, stderr=file, env=environment)


def end_process(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


async def wait_for_file(path: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline_s = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise TimeoutError(f"{path} was not written; see the log beside it")
        await asyncio.sleep(0.02)
    return path.read_text()


async def wait_for_url(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise TimeoutError(f"{url} did not answer; exit code {process.poll()}")
            await asyncio.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children."""
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
