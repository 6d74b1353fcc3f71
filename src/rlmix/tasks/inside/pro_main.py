"""Runs a task of SWE-bench Pro: its own script prints, its own parser reads, both in here.

The parser is data of the benchmark, so it never runs in the host process. It runs after everything
that the tests left behind was ended, on copies of the output that they cannot reach.
"""

import os

from rlmix.tasks.inside.processes import packed, read_report, run_command
from rlmix.tasks.inside.submission import begin
from rlmix.tasks.inside.tree import write_file

PARSER_S = 60.0


def main(data, report_fd):
    say, folder, env = begin(data, report_fd)
    if folder is None:
        return
    script = os.path.join(folder, "run_script.sh")
    write_file(folder, "run_script.sh", data["scripts"]["run_script.sh"].encode(), 0o755)
    argv = ["/bin/bash", script, *([data["command"]] if data["command"] else [])]
    status, out, err = run_command(argv, data["repo"], env, data["timeout_s"], True)
    say("output", packed(out + err))
    say("exit", "none" if status is None else str(status))
    if status is not None:
        for name, content in (("stdout.log", out), ("stderr.log", err)):
            write_file(folder, name, content, 0o600)
        # Written now: while the tests ran there was no parser to change.
        write_file(folder, "parser.py", data["scripts"]["parser.py"].encode(), 0o600)
        paths = [os.path.join(folder, n) for n in ("parser.py", "stdout.log", "stderr.log")]
        result = os.path.join(folder, "output.json")
        parser = [os.path.join(folder, "bin/python3"), "-I", *paths, result]
        read, said, _ = run_command(parser, folder, env, PARSER_S)
        outcomes = read_report(result) if read == 0 else None
        if outcomes is None:
            say("unread", said[-300:].decode("utf-8", "replace"))
        else:
            say("outcomes", packed(outcomes))
    say("done")


main(data, report_fd)  # noqa: F821  (given by the launcher)
