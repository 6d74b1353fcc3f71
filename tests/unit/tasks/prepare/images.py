"""Unpacked images with real git repositories in which a fix is planted in every known place."""

import os
import subprocess
import zipfile
from pathlib import Path

from rlmix.tasks.record import (
    Base,
    GoldRecord,
    HiddenRecord,
    SourceTask,
    TaskRecord,
)

BUGGY = (
    "def total(values):\n    result = 0\n    for value in values:\n        result -= value\n"
    "    return result\n"
)
SECRET = "        result += value  # summed, not subtracted"
FIXED = BUGGY.replace("        result -= value", SECRET)
FIX = (
    "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
    "@@ -1,5 +1,5 @@\n def total(values):\n     result = 0\n     for value in values:\n"
    f"-        result -= value\n+{SECRET}\n     return result\n"
)
TEST = (
    "from pack.sums import total\n\n\ndef test_the_sum_of_many_values():\n"
    "    assert total([2, 3]) == 5\n"
)
HIDDEN_PATCH = (
    "diff --git a/tests/test_sums.py b/tests/test_sums.py\nnew file mode 100644\n--- /dev/null\n"
    "+++ b/tests/test_sums.py\n@@ -0,0 +1,5 @@\n"
    + "".join(f"+{line}\n" for line in TEST.splitlines())
)
SETUP = "from setuptools import setup\n\nsetup(name='pack', packages=['pack'], version='0')\n"


def sh(script: str, cwd: Path) -> str:
    env = {
        "PATH": os.environ["PATH"], "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b", "GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z", "GIT_ALLOW_PROTOCOL": "file",
    }  # fmt: skip
    done = subprocess.run(["bash", "-ec", script], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def plain_image(root: Path) -> Path:
    """An image whose repository is at its base, with a tag three commits earlier, odd files, and
    build outputs that git ignores."""
    repo = root / "testbed"
    repo.mkdir(parents=True)
    sh("git init -q -b main . && git commit -q --allow-empty -m first", repo)
    write(
        repo,
        {
            "pack/__init__.py": "",
            "pack/sums.py": BUGGY,
            "setup.py": SETUP,
            ".gitignore": "build/\n*.so\n__pycache__/\n*.log\n",
            ".gitattributes": "*.txt text eol=lf\n",
            "crlf.txt": "one\r\ntwo\r\n",
            "run.sh": "#!/bin/sh\necho run\n",
            "kept.log": "tracked although ignored\n",
            "na\u00efve name.txt": "x\n",
            "data.bin": bytes(range(256)),
        },
    )
    (repo / "run.sh").chmod(0o755)
    os.symlink("pack/sums.py", repo / "link.py")
    sh(
        "git -c core.autocrlf=false add -A && git add -f kept.log && git commit -q -m base && "
        "git tag -a v1.2.0 -m v1.2.0 && git commit -q --allow-empty -m one && "
        "git commit -q --allow-empty -m two && git commit -q --allow-empty -m three",
        repo,
    )
    write(repo, {"build/native.so": b"\x7fELF compiled", "pack/fast.so": b"\x7fELF more"})
    write(root, {"usr/lib/python3/site-packages/other/__init__.py": "x = 1\n"})
    return root


def leaking_image(root: Path) -> Path:
    """The same, with the fix everywhere an agent has been seen to find it."""
    repo = plain_image(root) / "testbed"
    base = sh("git rev-parse HEAD", repo).strip()
    fix = f"cat > pack/sums.py <<'END'\n{FIXED}END\n"
    # A branch, a tag, a remote, notes, a stash, a replaced object, a dangling commit in a pack.
    sh(
        f"git checkout -q -b future && {fix} git commit -qam 'the fix' && git tag v9 && "
        "git update-ref refs/remotes/origin/main future && git notes add -m 'see future' main && "
        f"git checkout -q main && {fix} git stash -q && "
        f"git checkout -q --detach && {fix} git commit -qam dangling && git checkout -q main && "
        "git repack -adq && git replace HEAD future && git replace -d HEAD",
        repo,
    )
    # An alternate: another store that holds the fix.
    store = root / "opt/mirror.git"
    sh(f"git clone -q --bare . {store}", repo)
    write(repo, {".git/objects/info/alternates": f"{store}/objects\n"})
    # A submodule's git folder and a nested repository.
    write(repo, {".git/modules/lib/HEAD": "ref: refs/heads/main\n"})
    inner_fix = fix.replace("pack/", "")
    sh(
        "mkdir -p vendor/inner && cd vendor/inner && git init -q -b main . && "
        f"{inner_fix} git add -A && git commit -qm inner && git rm -q sums.py && "
        "git commit -qm gone && touch keep",
        repo,
    )
    # Installed copies, bytecode, a build folder, a wheel in a cache, results of test runs.
    site = "usr/lib/python3/site-packages/pack"
    write(
        root,
        {
            f"{site}/__init__.py": "",
            f"{site}/sums.py": FIXED,
            f"{site}/__pycache__/sums.cpython-311.pyc": b"bytecode of the fix",
            "testbed/build/lib/pack/sums.py": FIXED,
            "testbed/.pytest_cache/v/cache/lastfailed": '{"tests/test_sums.py::test_x": true}',
            "testbed/pack/__pycache__/sums.cpython-311.pyc": b"bytecode of the fix",
            "logs/verifier/reward.txt": "1\n",
            "testbed/tests/test_sums.py": TEST,
        },
    )
    wheel = root / "root/.cache/pip/wheels/pack-2.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pack/sums.py", FIXED)
    os.utime(repo / "pack/sums.py", (1_900_000_000, 1_900_000_000))
    assert sh("git rev-parse HEAD", repo).strip() == base
    return root


def task(
    *,
    base: str = "",
    gold: GoldRecord | None = None,
    knows_fix: bool = True,
    workdir: str = "/testbed",
) -> SourceTask:
    if gold is None and knows_fix:
        gold = GoldRecord(task_id="t", patch=FIX)
    return SourceTask(
        public=TaskRecord(
            task_id="t",
            source="made",
            revision="r",
            repository="owner/pack",
            language="python",
            prompt="total() subtracts",
            image=None,
            workdir=workdir,
            base=Base(kind="commit", commit=base) if base else Base(kind="tree"),
        ),
        hidden=HiddenRecord(
            task_id="t",
            test_command="pytest tests",
            hidden_patch=HIDDEN_PATCH,
            fail_to_pass=("tests/test_sums.py::test_the_sum_of_many_values",),
            image_paths=("/logs", "/testbed/run_tests.sh"),
        ),
        gold=gold,
    )
