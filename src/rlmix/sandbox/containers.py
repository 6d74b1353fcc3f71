"""Backends that let a container engine make the sandbox: Docker, Podman, Apptainer.

The engine's client is the launcher's child. It passes on three descriptors: requests come in on 0,
answers leave on 1, output on 2. Signals it gets reach the first process of the container.

Invariant: a container carries the run's label, so that whoever finds it can end it, and it ends by
itself when its client does, because its requests end then.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlmix.core.errors import ConfigError, SandboxError
from rlmix.core.task import Commit, PreparedRepository
from rlmix.sandbox import wire
from rlmix.sandbox.bubblewrap import BASE, HOME, REPO, SCRATCH, SHM_BYTES, STATIC
from rlmix.sandbox.cgroups import Group
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.layers import Change, changes_in, engine_mounts
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.output import OutputRing
from rlmix.sandbox.placement import Placement
from rlmix.sandbox.protocol import EXIT_TIMED_OUT, PythonResult, SandboxLimits
from rlmix.sandbox.reap import ENGINE_LIST, RUN_LABEL
from rlmix.sandbox.repository import RepositoryTemplate
from rlmix.sandbox.session import ShellSandbox
from rlmix.sandbox.shell import StaticOptions

SETTLE_S = 0.05
"""An engine forwards answers and output separately; output may come this much later."""
ENGINE_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 20.0
INNER_ID = "1000:1000"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_LOGIN_PATH = 'printf %s "$PATH"'
_PROBE_HISTORY = (Commit(message="probe", files={"probe.txt": "probe\n"}),)
_PROBE = """
exec 2>/dev/null
for path in /usr /etc / /sys /proc/sys/kernel; do
  (: >"$path/rlmix_probe") && echo "writable:$path"
done
unshare -Ur true && echo "namespace:user"
while read -r name _; do
  [[ $name = *: && $name != lo: ]] && echo "interface:$name"
done </proc/net/dev
while read -r name value; do
  [[ $name = CapEff: && ! $value =~ ^0+$ ]] && echo "capabilities:$value"
  [[ $name = NoNewPrivs: && $value != 1 ]] && echo "privileges:may-rise"
done </proc/self/status
git --version >/dev/null || echo "missing:git"
true
"""
# Reads the program from 0, reports on what was 1, prints on 2.
_BOOT = """
import marshal, os, sys
code, data = marshal.loads(sys.stdin.buffer.read())
report = os.dup(1)
os.dup2(2, 1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
data |= {"repo": sys.argv[1], "base": sys.argv[2], "home": sys.argv[3]}
exec(marshal.loads(code), {"__name__": "rlmix_sandbox", "data": data, "report_fd": report})
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerSpec:
    """What a command line is made of."""

    program: str
    """Path of the engine's client."""
    image: str
    name: str
    run_id: str
    static: str
    template: str
    limits: SandboxLimits
    repo: str = REPO
    """Where the task's own commands expect the repository."""
    writable: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    """What is seen otherwise than the image has it."""

    @property
    def mounts(self) -> tuple[str, ...]:
        return tuple(
            engine_mounts(self.changes, overlay=f"{self.template}/overlay", static=self.static)
        )


CommandLine = Callable[[ContainerSpec, list[str]], list[str]]


def docker_command(spec: ContainerSpec, inside: list[str]) -> list[str]:
    """Docker and Podman: `inside` in a new container with nothing but what we give it."""
    limits = spec.limits
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mib}m"
    memory = f"{limits.memory_mib + 2 * limits.disk_mib + (SHM_BYTES >> 20)}m"
    cpus = [] if limits.cpus is None else ["--cpus", f"{limits.cpus:g}"]
    return [
        *(spec.program, "run", "--rm", "--interactive", "--pull", "never", "--name", spec.name),
        *("--label", f"{RUN_LABEL}={spec.run_id}", "--hostname", "sandbox"),
        *("--network", "none", "--ipc", "private", "--user", INNER_ID),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"),
        *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.pids + 1)),
        *cpus,
        *("--shm-size", str(SHM_BYTES), "--ulimit", "core=0", "--ulimit", "nofile=512"),
        *_each("--tmpfs", [f"{folder}:{tmpfs}" for folder in (spec.repo, HOME, *spec.writable)]),
        *spec.mounts,
        *("--volume", f"{spec.static}:{STATIC}:ro", "--volume", f"{spec.template}:{BASE}:ro"),
        *("--workdir", "/", "--entrypoint", inside[0], spec.image, *inside[1:]),
    ]


def _each(option: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def apptainer_command(spec: ContainerSpec, inside: list[str]) -> list[str]:
    """Apptainer: no daemon; limits need a delegated control group of version 2."""
    limits = spec.limits
    cpus = [] if limits.cpus is None else ["--cpus", f"{limits.cpus:g}"]
    return [
        *(spec.program, "exec", "--containall", "--cleanenv", "--no-eval", "--no-privs"),
        *("--net", "--network", "none", "--hostname", "sandbox"),
        *("--memory", f"{limits.memory_mib}M", "--pids-limit", str(limits.pids + 4), *cpus),
        *("--bind", f"{spec.static}:{STATIC}:ro", "--bind", f"{spec.template}:{BASE}:ro"),
        *_each("--scratch", [spec.repo, HOME, *spec.writable]),
        *spec.mounts,
        *("--pwd", "/", spec.image, *inside),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    command: CommandLine
    has_exec: bool
    """A second process can be started in a running container by the container's name."""
    install: str


ENGINES: dict[str, Engine] = {
    "docker": Engine(command=docker_command, has_exec=True, install="install Docker"),
    "podman": Engine(command=docker_command, has_exec=True, install="install Podman"),
    "apptainer": Engine(command=apptainer_command, has_exec=False, install="install Apptainer"),
}


class ContainerBackend(LaunchedBackend):
    """One container for each sandbox, from one image."""

    is_isolated = True

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        program: str,
        image: str | None,
        limits: SandboxLimits,
        folder: Path,
        run_id: str,
    ) -> None:
        """
        Args:
            image: of tasks that have none of their own; None: all have one.
        """
        super().__init__(limits=limits, folder=folder, run_id=run_id, uids=None)
        self.name = name
        self._engine = engine
        self._program = program
        self._image = image
        self._login_paths: dict[str, str] = {}
        """Image that was looked at -> its login shell's PATH."""
        self._looking = asyncio.Lock()
        self._changes: dict[Path, tuple[Change, ...]] = {}
        self._removers: list[subprocess.Popen[bytes]] = []

    async def open(self) -> None:
        """Look at the image of tasks without one of their own; the others when they come."""
        if self._engine.has_exec:
            (self._folder / ENGINE_LIST).write_text(f"{self._program}\n")
        self._write_static(inside=STATIC, has_pids_limit=False)
        if self.name == "apptainer":
            self.warnings += ("sandbox.disk_mib has no effect with apptainer",)
        if self._image is not None:
            await self._ensure_launcher()
            await self._before(await self.prepare(_PROBE_HISTORY))

    async def _before(self, template: RepositoryTemplate) -> None:
        """The image's PATH and its isolation, once per image; the overlay, once per template."""
        if template.path not in self._changes:
            self._changes[template.path] = await asyncio.to_thread(
                changes_in, template.path / "overlay"
            )
        image = self._image_of(template)
        async with self._looking:
            if image not in self._login_paths:
                path = await self._ask_login_path(image)
                await self._look_around(image, path)
                self._login_paths[image] = path

    def _image_of(self, template: RepositoryTemplate) -> str:
        named = "" if template.prepared is None else template.prepared.image
        if not named and not self._image:
            raise SandboxError(
                f"sandbox.backend={self.name}: the task names no image; set sandbox.image to one "
                f"that has bash, git and {wire.PYTHON}"
            )
        return named or str(self._image)

    async def _look_around(self, image: str, path: str) -> None:
        probe = await self.prepare(_PROBE_HISTORY)
        stand_in = PreparedRepository(folder="", commit=probe.base_commit, image=image)
        template = replace(probe, prepared=stand_in)
        self._login_paths[image] = path
        self._changes[probe.path] = ()
        sandbox = await self._start(template)
        try:
            result = await sandbox.run(_PROBE, timeout_s=ENGINE_TIMEOUT_S)
            faults = result.output.split()
            if faults or result.exit_code != 0:
                raise SandboxError(
                    f"sandbox.backend={self.name}: not isolated or not usable with image "
                    f"{image}: {' '.join(faults) or result.exit_code}"
                )
        except BaseException:
            del self._login_paths[image]
            raise
        finally:
            await sandbox.destroy()

    async def _ask_login_path(self, image: str) -> str:
        """PATH as the image's own profile sets it; images lose their ENV when they are copied."""
        # Nothing of ours is there yet, so the empty folder stands for the template as well.
        static = str(self._folder / "static")
        spec = self._spec(f"rlmix_{secrets.token_hex(6)}", static, image)
        argv = self._engine.command(spec, ["/bin/bash", "-lc", _LOGIN_PATH])
        try:
            done = await asyncio.to_thread(
                subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=ENGINE_TIMEOUT_S, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines() or ["no reason"]
            raise SandboxError(
                f"sandbox.backend={self.name}: cannot start image {image}: {said[0]} Start "
                f"the engine, and get the image with `{self.name} pull {image}`"
            ) from None
        # A profile may print greetings; the path is the last line.
        return (done.stdout.strip().splitlines() or [DEFAULT_PATH])[-1]

    def _spec(self, name: str, template: str, image: str) -> ContainerSpec:
        return ContainerSpec(
            program=self._program,
            image=image,
            name=name,
            run_id=self._run_id,
            static=str(self._folder / "static"),
            template=template,
            limits=self._limits,
        )

    @property
    def _static_options(self) -> StaticOptions:
        return StaticOptions(is_stdio=True)

    def _placement(
        self, template: RepositoryTemplate, uid: int | None, group: Group | None
    ) -> Placement:
        name = f"rlmix_{secrets.token_hex(8)}"
        prepared, image = template.prepared, self._image_of(template)
        spec = self._spec(name, str(template.path), image)
        if prepared is not None:
            spec = replace(
                spec,
                repo=prepared.workdir or REPO,
                writable=prepared.writable,
                changes=self._changes[template.path],
            )
        loop = [
            *("/bin/bash", "--norc", "--noprofile", f"{STATIC}/loop.sh"),
            *(spec.repo, BASE, SCRATCH, HOME),
            f"PATH={STATIC}/bin:{self._login_paths[image]}",
        ]
        kept = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR")
        return Placement(
            argv=self._engine.command(spec, loop),
            env={
                **{key: os.environ[key] for key in kept if key in os.environ},
                RUN_MARK: self._run_id,
            },
            cwd="/",
            uid=None,
            has_namespaces=False,
            is_stdio=True,
            container=name,
            settle_s=SETTLE_S,
            repo=spec.repo,
            base=BASE,
            home=HOME,
            base_commit=template.base_commit,
        )

    def _make_sandbox(self, placement: Placement, on_end: Callable[[], None]) -> ShellSandbox:
        return ContainerSandbox(self._link, placement, self._limits, on_end=on_end, owner=self)

    def _clean(self, placement: Placement) -> None:
        if self._engine.has_exec:
            # Its client is dead and cannot remove it any more. Nobody has to wait for this.
            with contextlib.suppress(OSError):
                remover = subprocess.Popen(
                    [self._program, "rm", "--force", placement.container],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                self._removers.append(remover)

    async def close(self) -> None:
        await super().close()
        for remover in self._removers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(remover.wait, REMOVE_TIMEOUT_S)
        self._removers.clear()


class ContainerSandbox(ShellSandbox):
    """Runs our own programs by the engine's `exec`, since no fork of the launcher can enter."""

    def __init__(self, *args: object, owner: ContainerBackend, **rest: object) -> None:
        super().__init__(*args, **rest)  # type: ignore[arg-type]
        self._owner = owner

    async def run_payload(self, payload: bytes, timeout_s: float) -> PythonResult:
        owner, place = self._owner, self._place
        if not owner._engine.has_exec:
            raise SandboxError(
                f"sandbox.backend={owner.name}: programs of ours cannot be run in a container that "
                "lives already; use docker, podman or namespaces for tasks with unit tests"
            )
        process = await asyncio.create_subprocess_exec(
            *(owner._program, "exec", "--interactive", "--workdir", place.repo, place.container),
            *("python3", "-I", "-S", "-c", _BOOT, place.repo, place.base, place.home),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            report, output = await asyncio.wait_for(process.communicate(payload), timeout_s)
        except TimeoutError:
            self.kill()
            process.kill()
            await process.wait()
            return PythonResult(report=b"", output="", exit_code=EXIT_TIMED_OUT, timed_out=True)
        ring = OutputRing(self._limits.output_chars)
        ring.write(output)
        return PythonResult(report=report, output=ring.text()[0], exit_code=process.returncode or 0)


def find_engine(
    name: str, image: str | None, *, has_images: bool = False
) -> tuple[Engine, str, str | None]:
    """(engine, path of its client, image of tasks without one).

    Args:
        has_images: tasks come with images of their own.

    Raises:
        ConfigError: no image is named, and tasks have none.
        SandboxError: the engine's client is not installed.
    """
    engine = ENGINES[name]
    if not image and not has_images:
        raise ConfigError(
            f"sandbox.backend={name}: sandbox.image is not set; name an image that has bash, git "
            f"and {wire.PYTHON}"
        )
    program = shutil.which(name)
    if program is None:
        raise SandboxError(f"sandbox.backend={name}: no `{name}` on PATH; {engine.install}")
    return engine, os.path.realpath(program), image
