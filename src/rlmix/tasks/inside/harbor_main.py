"""Runs a Harbor task: its own script at /tests/test.sh says by a file, or by how it ends.

The folders of the script are the task's own mounts, empty until now, so nothing that was there
before decides. Reward files are read after everything that the tests left behind was ended.
"""

import os

from rlmix.tasks.inside.processes import packed, read_report, run_command
from rlmix.tasks.inside.submission import begin
from rlmix.tasks.inside.tree import remove, write_file

VERIFIER = "/logs/verifier"


def main(data, report_fd):
    say, folder, env = begin(data, report_fd)
    if folder is None:
        return
    for path, text in data["scripts"].items():
        write_file("/", path.strip("/"), text.encode("utf-8", "surrogateescape"), 0o755)
    remove(VERIFIER)
    os.makedirs(VERIFIER)
    argv = ["/bin/bash", data["command"]]
    status, output, _ = run_command(argv, data["repo"], env, data["timeout_s"])
    say("output", packed(output))
    for name in ("reward.txt", "reward.json"):
        content = read_report(os.path.join(VERIFIER, name))
        if content is not None:
            say(name, packed(content))
    say("exit", "none" if status is None else str(status))
    say("done")


main(data, report_fd)  # noqa: F821  (given by the launcher)
