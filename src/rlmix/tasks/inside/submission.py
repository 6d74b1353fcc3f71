"""Brings the work tree into the state that is judged: diff, protected paths, hidden tests."""

import os
import sys

from rlmix.tasks.inside.processes import guard_this_process, speaker
from rlmix.tasks.inside.protected import is_foreign
from rlmix.tasks.inside.restore import git_apply, paths_of, put_back, restore_protected
from rlmix.tasks.inside.tree import files_below, write_file


def own_python(folder):
    """A folder with this interpreter, to be looked at after those of the image."""
    place = os.path.join(folder, "bin")
    os.mkdir(place)
    for name in ("python", "python3"):
        os.symlink(os.path.realpath(sys.executable), os.path.join(place, name))
    return place


def apply_submission(data, say):
    """Diff, protected paths, hidden patch, hidden files; False when the command must not run."""
    repo, base, home = data["repo"], data["base"], data["home"]
    before = set(files_below(repo))
    if data["diff"]:
        status, _ = git_apply(data["diff"], repo, base, home)
        if status != 0:
            say("unappliable", str(status))
            return False
    foreign = [path for path in files_below(repo) if path not in before and is_foreign(path)]
    if foreign:
        say("foreign", foreign[0])
        return False
    for path in restore_protected(repo, base):
        say("reverted", path)
    if data["hidden_patch"]:
        for path in paths_of(data["hidden_patch"], repo, base, home):
            if put_back(path, repo, f"{base}/repo"):
                say("reverted", path)
        status, _ = git_apply(data["hidden_patch"], repo, base, home)
        if status != 0:
            say("hidden_unappliable", str(status))
            return False
    for path, text in data["tests"].items():
        write_file(repo, path, text.encode("utf-8", "surrogateescape"), 0o644)
    say("applied")
    return True


def begin(data, report_fd):
    """(function that reports, private folder, environment of the tests); folder and environment are
    None when the diff cannot be judged by running anything."""
    say = speaker(report_fd, data["nonce"])
    guard_this_process()
    say("begin")
    if not apply_submission(data, say):
        return say, None, None
    folder = os.path.join(data["home"], data["nonce"])
    os.mkdir(folder, 0o700)
    env = {**os.environ, "HOME": data["home"], "TMPDIR": data["home"], **data["env"]}
    env["PATH"] += ":" + own_python(folder)
    return say, folder, env
