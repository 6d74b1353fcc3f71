"""What an agent could reach in a task's sandbox, looked at once per task and written down.

A number counts only when neither the network nor the repository's history held the answer.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rlmix.observe.jsonl import JsonlWriter, read_jsonl
from rlmix.sandbox.protocol import SandboxBackend
from rlmix.tasks.benchmark import BenchTask

PROBES_FILE = "probes.jsonl"
PROBE_S = 30.0
# Addresses and not names: a resolver that fails must not look like a network that is closed.
SCRIPT = r"""
for place in 1.1.1.1/53 8.8.8.8/443 169.254.169.254/80; do
  timeout 2 bash -c "exec 3<>/dev/tcp/$place" 2>/dev/null && echo "reached $place"
done
sed -n '3,$s/^ *\([^:]*\):.*/interface \1/p' /proc/net/dev 2>/dev/null
export GIT_OPTIONAL_LOCKS=0
if git rev-parse HEAD >/dev/null 2>&1; then
  echo "commits $(git rev-list HEAD --count)"
  echo "elsewhere $(git rev-list --all --not HEAD --count)"
  echo "lost $(git fsck --unreachable --no-reflogs --no-progress 2>/dev/null | grep -c commit)"
  echo "remotes $(git remote | wc -l)"
  echo "stashes $(git stash list | wc -l)"
fi
echo done
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one sandbox let an agent see."""

    task_id: str
    network: tuple[str, ...]
    """Addresses that answered, and interfaces beside the loopback."""
    commits: int
    """That the base reaches."""
    history: dict[str, int]
    """Commits of other references, unreachable commits, remotes, stashes; all 0 when clean."""
    fault: str = ""
    """Why nothing could be looked at."""

    @property
    def is_clean(self) -> bool:
        return not (self.network or any(self.history.values()) or self.fault)


async def probe(task: BenchTask, backend: SandboxBackend) -> Probe:
    """Look at a fresh sandbox of a task.

    Raises:
        SandboxError: there is none.
    """
    sandbox = await backend.create(await backend.prepare(task.public.repository))
    try:
        done = await sandbox.run(SCRIPT, PROBE_S, 4000)
    finally:
        await sandbox.destroy()
    return read_probe(task.public.task_id, done.output)


def read_probe(task_id: str, output: str) -> Probe:
    """The probe that the script's lines tell of."""
    pairs = [line.partition(" ")[::2] for line in output.split("\n") if line.strip()]
    network = [text for kind, text in pairs if kind == "reached"]
    network += [text for kind, text in pairs if kind == "interface" and text.strip() != "lo"]
    counts = {kind: int(text) for kind, text in pairs if text.isdecimal()}
    return Probe(
        task_id=task_id,
        network=tuple(network),
        commits=counts.get("commits", 0),
        history={name: counts.get(name, 0) for name in ("elsewhere", "lost", "remotes", "stashes")},
        fault="" if ("done", "") in pairs else f"the probe did not end: {output.strip()[-200:]}",
    )


def failed_probe(task_id: str, fault: str) -> Probe:
    return Probe(task_id=task_id, network=(), commits=0, history={}, fault=fault)


def read_probes(folder: Path) -> dict[str, Probe]:
    """What was looked at before, by task."""
    rows = read_jsonl(folder / PROBES_FILE)
    return {row["task_id"]: Probe(**{**row, "network": tuple(row["network"])}) for row in rows}


def append_probe(folder: Path, found: Probe) -> None:
    writer = JsonlWriter(folder / PROBES_FILE)
    writer.append(asdict(found))
    writer.close()
