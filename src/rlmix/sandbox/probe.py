"""Shows that a sandbox isolates, on this machine, before anything runs in one.

The first half reads the kernel's own record of the first process from outside, which nothing
inside can forge; the second half tries what an agent would try.
"""

import os
import shlex
from pathlib import Path

from rlmix.core.errors import SandboxError
from rlmix.sandbox.protocol import Sandbox

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
PROBE_TIMEOUT_S = 20.0

# Each line prints one word when the attempt succeeds; silence is isolation. Nothing here changes
# the host where isolation fails: files are opened for appending and nothing is written.
ATTEMPTS = """
exec 2>/dev/null
for path in /usr /etc / /sys /dev; do
  [[ -w $path ]] && echo "writable:$path"
done
for path in /proc/sys/kernel/printk /proc/sysrq-trigger /proc/irq/*/smp_affinity; do
  [[ -e $path ]] && (: >>"$path") && echo "writable:$path"
done
mount -o remount,bind,rw /usr && echo "remounted:/usr"
unshare -Ur true && echo "namespace:user"
(exec 5<>/dev/tcp/192.0.2.1/9) && echo "connected:outside"
while read -r name _; do
  [[ $name = *: && $name != lo: ]] && echo "interface:$name"
done </proc/net/dev
[[ -e /etc/shadow || -e /root/.ssh || -e "$HOST_FILE" ]] && echo "readable:host"
[[ -e /proc/1/mem ]] && echo "readable:/proc/1"
: >/repo/probe && : >/tmp/probe || echo "unwritable:repo"
true
"""

WEAK_ATTEMPTS = """
exec 2>/dev/null
for path in /usr /etc / /dev /tmp /var/tmp "$HOME/../.."; do
  (: >"$path/rlmix_probe") && echo "wrote:$path" && rm "$path/rlmix_probe"
done
for path in "$HOST_FILE" /etc/shadow /etc/hostname; do
  read -r -N 1 <"$path" && echo "read:$path"
done
(: >>"$HOST_FILE") && echo "wrote:host"
ls / >/dev/null && echo "listed:/"
unshare -Ur true && echo "namespace:user"
(exec 5<>/dev/tcp/127.0.0.1/9 || exec 5<>/dev/udp/127.0.0.1/9) && echo "socket:opened"
: >"$HOME/probe" && mkdir "$HOME/folder" && mv "$HOME/probe" "$HOME/folder/" || echo unwritable
python -c 'import json, sqlite3' || python -c 'import json' || echo "broken:python"
true
"""


async def check_isolation(sandbox: Sandbox, *, pid: int, drops_uid: bool, host_file: Path) -> None:
    """Raise SandboxError naming everything that the sandbox failed to keep apart."""
    found = outside_faults(pid, drops_uid=drops_uid)
    if found:
        raise SandboxError(f"sandbox: isolation is not complete here: {'; '.join(found)}")
    command = ATTEMPTS.replace('"$HOST_FILE"', shlex.quote(str(host_file)))
    result = await sandbox.run(command, timeout_s=PROBE_TIMEOUT_S)
    if result.exit_code != 0:
        found.append(f"probe ended with {result.exit_code}: {result.output.strip()}")
    found += result.output.split()
    if found:
        raise SandboxError(f"sandbox: isolation is not complete here: {'; '.join(found)}")


async def check_weak(
    sandbox: Sandbox, *, pid: int, drops_uid: bool, is_contained: bool, host_file: Path
) -> None:
    """The same of a sandbox without namespaces: what it promises, and no more."""
    found = outside_faults(pid, drops_uid=drops_uid, has_namespaces=False)
    if found:
        raise SandboxError(f"sandbox: isolation is not complete here: {'; '.join(found)}")
    command = WEAK_ATTEMPTS.replace('"$HOST_FILE"', shlex.quote(str(host_file)))
    if is_contained:
        command = "kill -0 1 2>/dev/null && echo signal:1\n" + command
    result = await sandbox.run(command, timeout_s=PROBE_TIMEOUT_S)
    if result.exit_code != 0:
        found.append(f"probe ended with {result.exit_code}: {result.output.strip()}")
    found += result.output.split()
    if found:
        raise SandboxError(f"sandbox: isolation is not complete here: {'; '.join(found)}")


def outside_faults(pid: int, *, drops_uid: bool, has_namespaces: bool = True) -> list[str]:
    """What the kernel says about process `pid` that a sandboxed process must not be."""
    faults = []
    for name in NAMESPACES if has_namespaces else ():
        if os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}"):
            faults.append(f"shares the {name} namespace")
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    # An ordinary user cannot lower the bounding set, and needs not: nothing raises above it.
    bounding = ("CapBnd",) if has_namespaces or os.geteuid() == 0 else ()
    for name in ("CapEff", "CapPrm", *bounding, "CapAmb"):
        if int(status[name], 16) != 0:
            faults.append(f"holds capabilities ({name}={status[name]})")
    if status["NoNewPrivs"] != "1":
        faults.append("may gain privileges (NoNewPrivs=0)")
    if status.get("Seccomp") != "2":
        faults.append("has no system call filter")
    if drops_uid and "0" in status["Uid"].split():
        faults.append("runs as root outside")
    return faults


def explain(text: str, sysctl: Path = Path("/proc/sys")) -> str:
    """The fix for a machine that refuses sandboxes, from bubblewrap's own words and sysctls."""
    if _is(sysctl / "kernel/apparmor_restrict_unprivileged_userns", "1"):
        return (
            "AppArmor forbids unprivileged user namespaces here (stock Ubuntu 23.10 and later); "
            "run `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` "
            "(keep it in /etc/sysctl.d/60-rlmix.conf)"
        )
    if _is(sysctl / "kernel/unprivileged_userns_clone", "0"):
        return "run `sudo sysctl -w kernel.unprivileged_userns_clone=1`"
    if _is(sysctl / "user/max_user_namespaces", "0"):
        return "run `sudo sysctl -w user.max_user_namespaces=15000`"
    if "proc" in text and "mount" in text.lower():
        return (
            "this container masks /proc; start it with `--security-opt systempaths=unconfined` "
            "(Kubernetes: procMount: Unmasked)"
        )
    if "No space left" in text:
        return "raise `user.max_user_namespaces` (sysctl) or close other sandboxes"
    return (
        "inside a container start it with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined` (Kubernetes: seccompProfile Unconfined), or run "
        "rlmix outside the container"
    )


def _is(path: Path, value: str) -> bool:
    try:
        return path.read_text().strip() == value
    except OSError:
        return False
