"""`scripts/venv` on a small project of its own: no network, a real interpreter, real pip.

The project's build backend lies in its folder, so that pip needs nothing from outside.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[3] / "scripts"

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "rlmix"
version = "0.1"
"""

BACKEND = """
import os, zipfile

FILES = {
    "rlmix-0.1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: rlmix\\nVersion: 0.1\\n"
    "Provides-Extra: dev\\n",
    "rlmix-0.1.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"
    "Tag: py3-none-any\\n",
    "rlmix-0.1.dist-info/entry_points.txt": "[console_scripts]\\nrlmix = small:main\\n",
    "small.py": "import sys\\ndef main(): print('ran', *sys.argv[1:])\\n",
}

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "rlmix-0.1-py3-none-any.whl"
    record = "".join(f"{path},,\\n" for path in FILES) + "rlmix-0.1.dist-info/RECORD,,\\n"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in {**FILES, "rlmix-0.1.dist-info/RECORD": record}.items():
            wheel.writestr(path, text)
    return name

build_wheel = build_editable
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with our scripts and a package that takes no time to install."""
    root = tmp_path / "a project"
    (root / "scripts").mkdir(parents=True)
    for name in ("venv", "rlmix"):
        shutil.copy2(SCRIPTS / name, root / "scripts" / name)
    (root / "scripts" / "constraints.txt").write_text("# nothing\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    return root


def python_without_venv(folder: Path, *, has_pip: bool) -> Path:
    """A Python as Debian ships it without python3-venv: `-m venv` fails for want of ensurepip."""
    python = folder / f"python-{'with' if has_pip else 'without'}-pip"
    no_pip = "" if has_pip else '*" -m pip "*) exit 1 ;;'
    python.write_text(
        "#!/bin/bash\n"
        'case " $* " in\n'
        '*" -m venv --without-pip "*) ;;\n'
        '*" -m venv "*|*" -m virtualenv "*) echo "ensurepip is not available"; exit 1 ;;\n'
        f"{no_pip}\n"
        "esac\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def quick_python(tmp_path: Path) -> Path:
    """Makes environments without ensurepip, which takes most of the time otherwise."""
    return python_without_venv(tmp_path, has_pip=True)


def environment(python: Path) -> dict[str, str]:
    # No virtualenv and no uv on this PATH.
    path = "/usr/bin:/bin"
    home = os.environ.get("HOME", "/")
    return {"PATH": path, "HOME": home, "RLMIX_PYTHON": str(python), "PIP_NO_INDEX": "1"}


def rlmix(root: Path, *arguments: str, python: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "scripts" / "rlmix", *arguments],
        cwd=root.parent,
        env=environment(python),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_the_first_use_sets_up_the_next_is_silent_and_a_changed_pin_is_followed(
    project: Path,
) -> None:
    python = Path(sys.executable)
    first = rlmix(project, "--help", python=python)
    assert (first.returncode, first.stdout) == (0, "ran --help\n"), first.stderr
    assert "first use: making .venv" in first.stderr

    second = rlmix(project, "a b", python=python)
    assert (second.stdout, second.stderr) == ("ran a b\n", "")

    marker = project / ".venv" / "marker"
    marker.touch()
    (project / "scripts" / "constraints.txt").write_text("# another pin\n")
    third = rlmix(project, python=python)
    assert "has to follow" in third.stderr
    assert marker.exists()


def test_what_failed_was_killed_or_moved_is_not_taken_for_whole(
    project: Path, quick_python: Path
) -> None:
    (project / "backend.py").write_text("def build_editable(*a, **k): raise OSError('disk full')\n")
    failed = rlmix(project, python=quick_python)
    assert failed.returncode == 1
    assert "installing failed" in failed.stderr
    assert "disk full" in failed.stderr

    (project / "backend.py").write_text(BACKEND)
    again = rlmix(project, python=quick_python)
    assert "the last set-up did not finish; starting over" in again.stderr
    assert again.stdout == "ran\n"

    # Killed half-way through: the environment looks whole.
    (project / ".venv.incomplete").touch()
    marker = project / ".venv" / "marker"
    marker.touch()
    (project / ".venv" / ".rlmix-installed").unlink()
    killed = rlmix(project, python=quick_python)
    assert "starting over" in killed.stderr
    assert killed.returncode == 0
    assert not marker.exists()
    assert not (project / ".venv.incomplete").exists()

    # The paths inside .venv are those of the old place.
    moved = project.rename(project.parent / "moved")
    anew = rlmix(moved, python=quick_python)
    assert "the project has moved" in anew.stderr
    assert anew.stdout == "ran\n"


def test_two_first_uses_at_once_both_work_and_install_once(
    project: Path, quick_python: Path
) -> None:
    running = [
        subprocess.Popen(
            [project / "scripts" / "rlmix", str(number)],
            env=environment(quick_python),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert [out for out, _ in said] == ["ran 1\n", "ran 2\n"]
    assert sorted("first use" in errors for _, errors in said) == [False, True]


def test_without_a_usable_python_the_remedy_is_named(project: Path, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    refused = rlmix(project, python=old)
    assert refused.returncode == 1
    assert "is no Python 3.11 or newer" in refused.stderr
    assert not (project / ".venv").exists()


def test_without_venv_and_without_pip_the_one_command_is_named(
    project: Path, tmp_path: Path
) -> None:
    refused = rlmix(project, python=python_without_venv(tmp_path, has_pip=False))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert refused.returncode == 1
    assert f"apt-get install python{version}-venv" in refused.stderr
    assert not (project / ".venv").exists()
