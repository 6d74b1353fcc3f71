"""A small unpacked image with real programs: bash, git and a few others of this machine."""

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    "bash", "cat", "chmod", "cp", "find", "git", "grep", "head", "ls", "mkdir", "mv", "rm", "sed",
    "tail", "touch",
)  # fmt: skip


def small_system(root: Path) -> Path:
    """Fill `root` with what a sandbox runs, linked where the disk is the same."""
    for name in PROGRAMS:
        program = os.path.realpath(shutil.which(name) or f"/usr/bin/{name}")
        _take(program, root / f"usr/bin/{name}")
        listing = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for word in listing.split():
            if word.startswith("/"):
                _take(os.path.realpath(word), root / word.strip("/"))
    for name in ("bin", "sbin"):
        if not (root / name).exists():
            (root / name).symlink_to("usr/bin")
    for name in ("etc", "root/.cache", "opt", "home"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "root").chmod(0o700)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/profile").write_text("echo hello\nexport PATH=/opt/tools/bin:/usr/bin:/bin\n")
    (root / "opt/tools/bin").mkdir(parents=True)
    tool = root / "opt/tools/bin/image-tool"
    tool.write_text("#!/bin/bash\necho of the image\n")
    tool.chmod(0o755)
    return root


def _take(source: str, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
