"""Applies a diff to the work tree and puts protected paths back."""

import os
import subprocess

from rlmix.tasks.inside.protected import is_protected, steering
from rlmix.tasks.inside.tree import clear_way, files_below, read_bytes, remove, write_file


def git_apply(diff, repo, base, home, *options):
    """`git apply` and nothing more lenient; returns (exit status, stdout)."""
    patch = os.path.join(home, "submitted.diff")
    remove(patch)
    with open(patch, "xb") as file:
        file.write(diff)
    env = {
        **os.environ,
        "GIT_DIR": f"{base}/capture",
        "GIT_WORK_TREE": repo,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "LC_ALL": "C",
    }
    argv = ["git", "apply", "--whitespace=nowarn", *options, patch]
    done = subprocess.run(argv, env=env, cwd=repo, stdout=subprocess.PIPE)
    os.unlink(patch)
    return done.returncode, done.stdout


def paths_of(diff, repo, base, home):
    """Paths that a diff writes, as git reads it; empty when git cannot."""
    status, listing = git_apply(diff, repo, base, home, "--numstat", "-z")
    if status != 0:
        return []
    fields = [entry.split(b"\t", 2) for entry in listing.split(b"\0") if entry]
    return [os.fsdecode(entry[-1]) for entry in fields]


def put_back(path, repo, original):
    """`path` as it was at the base, or gone; True when something had changed."""
    source, target = os.path.join(original, path), os.path.join(repo, path)
    if not os.path.lexists(source):
        if not os.path.lexists(target):
            return False
        remove(target)
        return True
    if os.path.islink(source):
        link = os.readlink(source)
        if os.path.islink(target) and os.readlink(target) == link:
            return False
        os.symlink(link, clear_way(repo, path))
        return True
    content, mode = read_bytes(original, path), os.stat(source).st_mode & 0o777
    if content is None:
        return False
    same = read_bytes(repo, path) == content and os.stat(target).st_mode & 0o777 == mode
    if not same:
        write_file(repo, path, content, mode)
    return not same


def restore_protected(repo, base):
    """Protected paths as they were at base; returns the paths that had been changed."""
    original = f"{base}/repo"
    now, before = set(files_below(repo)), set(files_below(original))
    guarded = {path for path in now | before if is_protected(path)}
    for path in (now | before) - guarded:
        was = read_bytes(original, path) if path in before else b""
        if was is None or steering(path, was) is None:
            continue
        content = read_bytes(repo, path) if path in now else None
        if content is None or steering(path, content) != steering(path, was):
            guarded.add(path)
    return [path for path in sorted(guarded) if put_back(path, repo, original)]
