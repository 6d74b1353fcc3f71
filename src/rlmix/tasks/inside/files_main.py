"""Puts files at absolute paths of a sandbox, for a script that is to be run there."""

from rlmix.tasks.inside.tree import write_file


def main(data):
    for path, text in data["files"].items():
        write_file("/", path.strip("/"), text.encode("utf-8", "surrogateescape"), 0o755)


main(data)  # noqa: F821  (given by the launcher)
