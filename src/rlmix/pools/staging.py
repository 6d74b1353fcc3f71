"""A replica's view of the versions that its machine has to fetch from a remote store."""

import asyncio
from pathlib import Path

from rlmix.pools.spec import StagingSpec
from rlmix.weights.remote import RemoteStore
from rlmix.weights.staging import Stager, StageReport


class StagedVersions:
    """Maps the trainer's version folders to copies on this machine. Without a remote store they
    are the same: everybody sees the trainer's folder."""

    def __init__(self, spec: StagingSpec | None) -> None:
        self._spec = spec
        self._stager: Stager | None = None
        self.last: StageReport | None = None
        """Of the newest copy; its bytes and seconds are told with the update that loads it."""

    async def bring(self, folder: Path) -> Path:
        """The copy of a published folder, `.../<view>/v000012`, fetched if it is not there.

        Raises:
            WeightSyncError: there is no undamaged way to it.
        """
        if self._spec is None:
            return folder
        if self._stager is None:
            remote = await asyncio.to_thread(RemoteStore, self._spec.url)
            self._stager = Stager(remote, self._spec.folder, limit_s=self._spec.limit_s)
        view, version = folder.parent.name, int(folder.name.removeprefix("v"))
        report = await asyncio.to_thread(self._stager.bring, view, version)
        if report.steps or self.last is None or self.last.version != version:
            self.last = report
        return report.folder

    def take(self, version: int) -> tuple[int, float]:
        """(bytes, seconds) of fetching a version, once."""
        report, self.last = self.last, None
        if report is None or report.version != version:
            return 0, 0.0
        return report.pull_bytes, report.pull_s + report.apply_s
