"""Edits of every shape come back as a diff that makes the same tree from the base."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rlmix.core.task import Commit
from rlmix.sandbox.protocol import WorkTreeError

from .conftest import Lab

FILES = {
    "a.py": "one\ntwo\nthree\n",
    "crlf.txt": "a\r\nb\r\n",
    "bare.txt": "no newline",
    "blob.bin": "\0\1\2" * 50,
    "run.sh": "#!/bin/sh\n",
    "kept.log": "tracked although ignored\n",
    ".gitignore": "*.log\n",
    "sub/deep.txt": "deep\n",
}
BASE = (Commit(message="base", files=FILES),)
LIST = (
    r"find . -path ./.git -prune -o -name '*.skip' -o -type l -printf '%P -> %l\n' "
    r"-o -type f -printf '%P %m ' -exec sha256sum {} \; | sort"
)
SHAPES = {
    "edit": "sed -i s/two/2/ a.py",
    "crlf edit": r"sed -i 's/a\r/A\r/' crlf.txt",
    "line ends changed": r"sed -i 's/\r//' crlf.txt",
    "no newline at the end": "printf 'no newline, still' > bare.txt",
    "newline taken away": "printf 'one\\ntwo\\nthree' > a.py",
    "new file": "echo new > new.py",
    "new empty file": "touch empty",
    "new folder with a space": "mkdir 'a b' && echo x > 'a b/c d'",
    "non-ascii name": "echo x > 'na\u00efve \u20ac.txt'",
    "name that is not utf-8": "echo x > $'bad\\xff.txt'",
    "latin-1 bytes": "printf 'caf\\xe9\\n' > latin.txt",
    "deleted": "rm a.py",
    "deleted folder": "rm -r sub",
    "renamed": "git mv a.py b.py",
    "renamed outside git and edited": "mv a.py c.py && echo four >> c.py",
    "mode": "chmod +x run.sh",
    "binary edited": "printf '\\0\\7' >> blob.bin",
    "binary and text": "head -c 5000 /dev/urandom > r.bin && echo x >> a.py",
    "symlink": "ln -s a.py link && ln -s /etc/passwd abs",
    "file becomes symlink": "rm a.py && ln -s crlf.txt a.py",
    "symlink loop": "ln -s loop loop",
    "tracked but ignored": "echo more >> kept.log",
    "trailing blanks": "printf 'one\\n\\n\\n  \\n' > a.py",
    "committed": "echo x >> a.py && git add -A && git commit -qm mine",
    "committed and moved on": "git checkout -qb other && rm a.py && git commit -qam gone",
    "history rewritten": "echo y > a.py && git commit -qa --amend -m z && git reflog expire --all",
    "git folder deleted": "rm -rf .git && echo x >> a.py",
    "index locked": "touch .git/index.lock && echo x >> a.py",
    "assume-unchanged": "git update-index --assume-unchanged a.py && echo x >> a.py",
    "hostile configuration": "git config diff.external /bin/true && git config core.pager cat && "
    "git config diff.noprefix true && git config color.ui always && "
    "git config core.autocrlf true && git config core.worktree /tmp && echo x >> a.py",
    "hostile attributes": "printf '* text=auto eol=crlf\\n*.py -diff\\n' > .gitattributes && "
    "echo x >> a.py && echo y >> crlf.txt",
    "hostile filter": "git config filter.f.clean 'echo filtered' && echo '*.py filter=f' > "
    ".git/info/attributes; mkdir -p .git/info && echo '*.py filter=f' >> .gitattributes; "
    "echo x >> a.py",
    "hooks": "mkdir -p .git/hooks && printf '#!/bin/sh\\ntouch /tmp/hooked' > "
    ".git/hooks/pre-commit && chmod +x .git/hooks/pre-commit && echo x >> a.py",
    "fifo and socket": 'mkfifo f.skip && python -c "import socket; '
    "socket.socket(socket.AF_UNIX).bind('s.skip')\" && echo x >> a.py",
    "unreadable": "echo x > secret && chmod 000 secret && chmod 644 secret && chmod 200 a.py && "
    "chmod 644 a.py && echo z >> a.py",
    "folder made unreadable": "echo z >> sub/deep.txt && chmod 000 sub",
}


def tree(folder: Path) -> str:
    return subprocess.run(
        ["/bin/bash", "-c", LIST], cwd=folder, capture_output=True, check=True
    ).stdout.decode(errors="replace")


def applied(base: Path, diff: bytes, folder: Path) -> str:
    """The tree after `git apply` on a copy of the base."""
    shutil.copytree(base / "repo", folder / "repo", symlinks=True)
    env = {
        "PATH": "/usr/bin:/bin",
        "GIT_DIR": str(base / "capture"),
        "GIT_WORK_TREE": str(folder / "repo"),
    }
    done = subprocess.run(
        ["/bin/sh", "-c", "umask 022; git apply --whitespace=nowarn -"],
        cwd=folder / "repo",
        env=env,
        input=diff,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return tree(folder / "repo")


@pytest.mark.parametrize("shape", SHAPES)
def test_an_edit_of_this_shape_makes_the_same_tree_again(
    lab: Lab, shape: str, tmp_path: Path
) -> None:
    template = lab.do(lab.backend.prepare(BASE))
    sandbox = lab.do(lab.backend.create(template))
    done = lab.do(sandbox.run(SHAPES[shape]))
    assert done.exit_code == 0, done
    diff = lab.do(sandbox.capture_diff())
    wanted = lab.do(sandbox.run(LIST, output_chars=20_000)).output
    lab.do(sandbox.destroy())
    assert diff != b""
    assert applied(template.path, diff, tmp_path) == wanted


def test_an_untouched_tree_is_an_empty_diff(lab: Lab) -> None:
    sandbox = lab.create(BASE)
    lab.do(sandbox.run("cat *.py > /dev/null; touch a.py; python -m compileall -q ."))
    lab.do(sandbox.run("rm -rf __pycache__"))
    assert lab.do(sandbox.capture_diff()) == b""
    lab.do(sandbox.destroy())


def test_new_ignored_files_are_not_part_of_the_diff(lab: Lab) -> None:
    sandbox = lab.create(BASE)
    lab.do(sandbox.run("echo x > debug.log"))
    assert lab.do(sandbox.capture_diff()) == b""
    lab.do(sandbox.destroy())


def test_a_full_tmp_does_not_stop_the_capture(lab: Lab) -> None:
    sandbox = lab.create(BASE)
    lab.do(sandbox.run("head -c 9M /dev/zero > /tmp/.fill; echo x >> a.py"))
    diff = lab.do(sandbox.capture_diff())
    assert b"+x\n" in diff
    lab.do(sandbox.destroy())


def test_processes_that_keep_writing_are_ended_first(lab: Lab) -> None:
    sandbox = lab.create(BASE)
    lab.do(sandbox.run("(while :; do echo $RANDOM > a.py; done) & (yes > /dev/null) & sleep 0.1"))
    first, second = lab.do(sandbox.capture_diff()), lab.do(sandbox.capture_diff())
    assert first == second
    assert lab.do(sandbox.run("pgrep yes; true")).output == ""
    lab.do(sandbox.destroy())


def test_an_empty_repository_inside_is_refused_as_the_agents_fault(lab: Lab) -> None:
    sandbox = lab.create(BASE)
    lab.do(sandbox.run("git init -q nested && echo x > nested/x"))
    with pytest.raises(WorkTreeError, match=r"git cannot record the work tree: .*nested"):
        lab.do(sandbox.capture_diff())
    lab.do(sandbox.destroy())


def test_a_diff_beyond_the_cap_is_refused_as_the_agents_fault(lab: Lab) -> None:
    sandbox = lab.create(BASE)
    lab.do(sandbox.run("head -c 2M /dev/urandom > r.bin"))
    with pytest.raises(WorkTreeError, match="larger than 1000000 bytes"):
        lab.do(sandbox.capture_diff(max_bytes=1_000_000))
    assert len(lab.do(sandbox.capture_diff())) > 2 << 20
    lab.do(sandbox.destroy())
