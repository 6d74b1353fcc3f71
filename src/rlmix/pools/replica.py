"""One replica: owns an engine process and everything that is done to it.

Lives in a Ray actor on the engine's node; plain Python, so that tests use it without Ray.
Invariant: the engine process never outlives this object's process, and no version is loaded from
files that were not verified right before.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmix.core.addresses import meeting_address, reachable, with_host
from rlmix.core.errors import EngineError, LaunchError
from rlmix.engine.keys import KEY_VARIABLE
from rlmix.engine.sglang.launch import start_command, start_environment
from rlmix.engine.sglang.readback import compare, numerics_of
from rlmix.launch.process import ChildProcess, describe_exit, log_tail
from rlmix.pools.engine_admin import PROBE_TIMEOUT_S, EngineAdmin
from rlmix.pools.probes import check_identity
from rlmix.pools.pushing import Pusher
from rlmix.pools.spec import (
    CanaryOutput,
    PlanMismatch,
    ReplicaInfo,
    ReplicaLoad,
    ReplicaSpec,
    UpdateReport,
    WeightProof,
)
from rlmix.pools.staging import StagedVersions
from rlmix.pools.verifying import Verifier
from rlmix.weights.push import tensor_names
from rlmix.weights.store import verify_version

log = logging.getLogger(__name__)

WATCH_EXTERNAL_EVERY_S = 1.0
EXTERNAL_SILENCES = 5
"""An external server that did not answer this often in a row is gone for us."""

CANARY_TIMEOUT_S = 60.0
"""For one canary prompt on an engine that may still be warming up."""


class Replica:
    """Boot it, activate versions, ask it, stop it. One call to `boot` per object."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._child: ChildProcess | None = None
        self._admin: EngineAdmin | None = None
        self._verifier: Verifier | None = None
        self._pusher: Pusher | None = None
        self._versions = StagedVersions(spec.staging)
        self._tensors: frozenset[str] = frozenset()
        """Names of the checkpoint that the engine started from, where weights are pushed."""
        self._verified: tuple[Path, str] | None = None
        """Folder that `pause_for` has verified for the load that follows, and its digest."""
        self._content = ""
        """Digest of the files of the version that was loaded last."""

    async def boot(self, version: int, folder: Path) -> ReplicaInfo:
        """Start the engine on a version and check that it is what the plan says.

        Raises:
            WeightSyncError: the version's files are damaged.
            LaunchError: the engine ended or was not ready in time; the message has its log's end.
            PlanMismatch: it runs, and says of itself something else than the plan.
            EngineError: it runs and cannot be talked to.
        """
        spec = self._spec
        folder = await self._versions.bring(folder)
        self._content = (await asyncio.to_thread(verify_version, folder)).content
        token, admin_token = _secret(spec.token_env), _secret(spec.admin_token_env)
        url = spec.url
        if url is None:
            self._child = self._start(version, folder, api_key=token, admin_key=admin_token)
            said = await self._child.wait_ready(spec.boot_timeout_s)
            url = reachable(str(said["url"]), os.environ)
        self._admin = EngineAdmin(url, name=spec.name, token=token, admin_token=admin_token)
        self._verifier = Verifier(url, name=spec.name, token=token, admin_token=admin_token)
        if spec.push is not None:
            self._tensors = await asyncio.to_thread(tensor_names, folder)
            self._pusher = Pusher(
                url,
                name=spec.name,
                token=token if admin_token is None else admin_token,
                host=meeting_address(spec.push.host, os.environ),
                num_ranks=spec.push.num_ranks,
                backend=spec.push.backend,
                limit_s=spec.update_timeout_s,
                bucket_bytes=spec.push.bucket_bytes,
            )
        info = await self._admin.server_info()
        numerics_key, unverified = await self._identify(info)
        served = str(info.get("weight_version", ""))
        if served != str(version):
            log.info("started with version %r, loading %d", served, version)
            await self._load(version, folder, pause_mode="abort")
        return ReplicaInfo(
            url=url,
            pid=0 if self._child is None else self._child.pid,
            numerics_key=numerics_key,
            version=version,
            unverified=unverified,
        )

    def _start(
        self, version: int, folder: Path, *, api_key: str | None, admin_key: str | None
    ) -> ChildProcess:
        """The engine's process, on the files of a version."""
        spec = self._spec
        values = {
            "{model_path}": str(folder),
            "{weight_version}": str(version),
            "{ready_file}": str(spec.ready_path),
        }
        argv: Sequence[str] = spec.argv
        env = dict(spec.env)
        if spec.token_env is not None and api_key is None:
            raise LaunchError(
                f"pools: {spec.name}: {spec.token_env} is not set in the process that starts its "
                "engine, and an engine without a key would answer anybody"
            )
        if spec.engine == "embedded" and api_key is not None:
            env[KEY_VARIABLE] = api_key
        if spec.engine == "sglang":
            env |= start_environment(
                argv,
                ready_path=spec.ready_path,
                api_key=api_key,
                admin_key=admin_key,
                environ=os.environ,
            )
            argv = start_command(argv)
        return ChildProcess.start(
            [_fill(word, values) for word in with_host(argv, os.environ)],
            name=spec.name,
            log_path=spec.log_path,
            env=env,
            ready_path=spec.ready_path,
        )

    async def _identify(self, info: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """The engine's numerics key, and the planned settings that it says nothing of.

        Raises:
            PlanMismatch: what it says differs from the plan.
        """
        spec = self._spec
        if spec.engine == "embedded":
            check_plan(spec, info)
            return str(info.get("numerics_key", "")), ()
        found = compare(
            spec.argv,
            info,
            await self._engine().loads_document(),
            accelerator=spec.expected["accelerator"],
            version=spec.expected["version"],
        )
        if found.differences:
            raise PlanMismatch(f"pools: {spec.name}: " + "; ".join(found.differences))
        if found.unverified:
            log.info("not reported by the server: %s", ", ".join(found.unverified))
        return numerics_of(spec.expected, info).compact(), found.unverified

    async def watch(self) -> str:
        """Wait until the engine has ended; returns how, with the last lines of its log."""
        if self._spec.url is not None:
            return await self._watch_external()
        child = self._started()
        returncode = await child.wait_exit()
        return (
            f"the engine ended with {describe_exit(returncode)}; log {child.log_path}:\n"
            f"{log_tail(child.log_path, lines=5)}"
        )

    async def _watch_external(self) -> str:
        """Until a server that is not ours has not answered several times in a row."""
        silences = 0
        while True:
            try:
                await self._engine().ping()
                silences = 0
            except EngineError as error:
                silences += 1
                if silences >= EXTERNAL_SILENCES:
                    return f"the external server is gone: {error}"
            await asyncio.sleep(WATCH_EXTERNAL_EVERY_S)

    async def stage(self, folder: Path) -> None:
        """Fetch a published version onto this machine, while the replica serves; nothing to do
        where the machine sees the trainer's folder.

        Raises:
            WeightSyncError: there is no undamaged way to it.
        """
        await self._versions.bring(folder)

    async def pause_for(self, folder: Path, pause_mode: str) -> None:
        """The first half of `activate`, for who has something to do in the pause before the load.

        Raises: as `activate`.
        """
        folder = await self._versions.bring(folder)
        self._verified = (folder, (await asyncio.to_thread(verify_version, folder)).content)
        await self._engine().pause(pause_mode, timeout_s=self._spec.update_timeout_s)

    async def activate(self, version: int, folder: Path, pause_mode: str) -> UpdateReport:
        """Verify a version's files while serving, then load them in a pause. After `pause_for` the
        same files are not read again.

        Raises:
            WeightSyncError: the files are damaged or gone; the replica serves on as before.
            EngineError: the engine failed; its weights may be mixed and it stays paused. Kill it.
        """
        folder = await self._versions.bring(folder)
        started_s = time.monotonic()
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == folder:
            content = verified[1]
        else:
            content = (await asyncio.to_thread(verify_version, folder)).content
        verified_s = time.monotonic()
        await self._load(version, folder, pause_mode=pause_mode)
        self._content = content
        pause_s = time.monotonic() - verified_s
        pull_bytes, fetch_s = self._versions.take(version)
        return UpdateReport(
            version=version,
            pull_s=round(fetch_s + verified_s - started_s, 4),
            pause_s=round(pause_s, 4),
            pull_bytes=pull_bytes,
        )

    async def loads(self) -> ReplicaLoad:
        return await self._engine().loads()

    async def canary(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> list[CanaryOutput]:
        """Greedy answers, all prompts at once so that they cost one prompt's time."""
        engine = self._engine()
        return list(
            await asyncio.gather(
                *[
                    engine.canary(prompt, max_new_tokens=max_new_tokens, timeout_s=CANARY_TIMEOUT_S)
                    for prompt in prompts
                ]
            )
        )

    async def verify(
        self,
        version: int,
        prompt_ids: Sequence[int],
        *,
        again: Path | None = None,
        canaries: Sequence[CanaryOutput] = (),
        tolerance_nats: float = 0.0,
    ) -> WeightProof:
        """Logprob, mask and version probe, and what the engine says of its weights; with `again`
        it first loads that folder, which it serves already, and must then answer `canaries` alike.

        Raises:
            AdmissionRefused: a probe failed; the message names it.
            EngineError: no answer.
        """
        assert self._verifier is not None
        if again is not None and canaries:
            # As updates come to it later: a push that reads back another checksum than the folder
            # is found before anything was sampled from it.
            before = await self._verifier.checksum()
            again = await self._versions.bring(again)
            await self._load(version, again, pause_mode="retract")
            num_tokens = len(canaries[0].output_ids)
            after = await self.canary([output.prompt_ids for output in canaries], num_tokens)
            check_identity(
                canaries,
                after,
                checksums=(before, await self._verifier.checksum()),
                name=self._spec.name,
                tolerance_nats=tolerance_nats,
            )
        await self._verifier.check_sampling(prompt_ids, version=version, is_short=again is None)
        return WeightProof(
            version=version, content=self._content, checksum=await self._verifier.checksum()
        )

    def process_id(self) -> int:
        """Of the process that owns the engine, for whoever wants to see it or end it."""
        return os.getpid()

    async def stop(self) -> None:
        """End the engine politely, then surely."""
        if self._child is not None:
            await self._child.stop(grace_s=3.0)

    def kill(self) -> None:
        """End the engine at once."""
        if self._child is not None:
            self._child.kill()

    async def _load(self, version: int, folder: Path, *, pause_mode: str) -> None:
        """Pause, load, flush, read the version back, continue. A failure leaves it paused."""
        engine = self._engine()
        limit_s = self._spec.update_timeout_s
        await engine.pause(pause_mode, timeout_s=limit_s)
        if self._pusher is None:
            await engine.update_from_disk(folder, version=version, timeout_s=limit_s)
        else:
            await self._pusher.push(folder, version=version, served=self._tensors)
        if pause_mode != "in_place":  # There, running requests keep theirs.
            await engine.flush_cache(timeout_s=limit_s)
        served = await engine.weight_version()
        if served != str(version):
            raise EngineError(
                f"pools: {self._spec.name} says it serves version {served!r} after it accepted "
                f"{version}"
            )
        await engine.resume(timeout_s=PROBE_TIMEOUT_S)

    def _started(self) -> ChildProcess:
        if self._child is None:
            raise LaunchError(f"pools: {self._spec.name} was not booted")
        return self._child

    def _engine(self) -> EngineAdmin:
        if self._admin is None:
            raise LaunchError(f"pools: {self._spec.name} was not booted")
        return self._admin


def check_plan(spec: ReplicaSpec, info: Mapping[str, Any]) -> None:
    """Compare what the engine says of itself with the plan.

    Raises:
        PlanMismatch: names every field that differs, with both values.
    """
    differences = [
        f"{key} is {info.get(key)!r}, the plan says {expected!r}"
        for key, expected in spec.expected.items()
        if str(info.get(key)) != expected
    ]
    if differences:
        raise PlanMismatch(f"pools: {spec.name}: " + "; ".join(differences))


def _secret(variable: str | None) -> str | None:
    """From the environment of the replica's process, the only place where secrets are."""
    return os.environ.get(variable) if variable else None


def _fill(word: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        word = word.replace(key, value)
    return word
