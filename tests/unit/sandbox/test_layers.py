"""Tasks with an image of their own: its files are seen, what the overlay hides is not."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit, PreparedRepository
from rlmix.sandbox import bubblewrap
from rlmix.sandbox.backend import make_folder, open_backend
from rlmix.sandbox.containers import (
    ContainerBackend,
    ContainerSpec,
    Engine,
    apptainer_command,
    docker_command,
)
from rlmix.sandbox.layers import (
    IS_FILE,
    IS_FOLDER,
    IS_LINK,
    MAX_MOUNTS,
    Change,
    bubblewrap_mounts,
    changes_in,
    engine_mounts,
    image_arguments,
    mark_hidden,
    reachable,
)
from rlmix.sandbox.protocol import SandboxBackend
from rlmix.sandbox.repository import build_template, fast_import_stream

from .conftest import LIMITS
from .rootfs import small_system

SECRET = "the fix lies here"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedRepository:
    """A task with an image in which a fix is installed, cached and left in a folder."""
    root = tmp_path_factory.mktemp("task")
    root.chmod(0o755)
    rootfs = small_system(root / "image")
    folder = root / "prepared"
    made = build_template(
        folder, fast_import_stream((Commit(message="m", files={"a.txt": "a\n"}),))
    )
    for path in ("opt/site/pack.py", "opt/cache/pack.whl", "srv/logs/reward.txt", "testbed/.git/x"):
        (rootfs / path).parent.mkdir(parents=True, exist_ok=True)
        (rootfs / path).write_text(SECRET)
    overlay = folder / "overlay"
    (overlay / "opt/site").mkdir(parents=True)
    (overlay / "opt/site/pack.py").write_text("of the base\n")
    mark_hidden(overlay, "/opt/cache/pack.whl", kind=IS_FILE)
    mark_hidden(overlay, "/srv/logs", kind=IS_FOLDER)
    mark_hidden(overlay, "/srv/logs/reward.txt", kind=IS_FILE)
    mark_hidden(overlay, "/tmp/left", kind=IS_FOLDER)
    # A link to what is hidden, and a folder that a sandbox's user cannot enter.
    (rootfs / "logs-link").symlink_to("/srv/logs")
    mark_hidden(overlay, "/logs-link", kind=IS_LINK)
    (rootfs / "srv/private").mkdir(mode=0o700)
    (rootfs / "srv/private/fix").write_text(SECRET)
    mark_hidden(overlay, "/srv/private/fix", kind=IS_FILE)
    return PreparedRepository(
        folder=str(folder),
        commit=made.base_commit,
        workdir="/testbed",
        rootfs=str(rootfs),
        writable=("/tests", "/logs"),
    )


def with_backend(scratch: Path, scenario: Callable[[SandboxBackend], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            backend = await open_backend("namespaces", LIMITS, scratch, "layers")
        except SandboxError as error:
            pytest.skip(f"this machine forbids sandboxes: {error}")
        try:
            await scenario(backend)
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_a_task_runs_in_its_image_and_sees_nothing_that_the_overlay_hides(
    prepared: PreparedRepository, tmp_path: Path
) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        sandbox = await backend.create(await backend.prepare(prepared))
        try:

            async def says(command: str) -> str:
                return (await sandbox.run(command)).output.strip()

            assert await says("pwd; cat a.txt; ls -A") == "/testbed\na\n.git\na.txt"
            assert await says("image-tool") == "of the image"  # By the login shell's PATH.
            assert await says("cat /opt/site/pack.py") == "of the base"
            assert await says("cat /opt/cache/pack.whl; ls /srv/logs /logs-link/") == (
                "/logs-link/:\n\n/srv/logs:"
            )
            found = await says(f"grep -rl '{SECRET}' / --exclude-dir=proc 2>/dev/null")
            assert found == ""
            assert "Read-only" in await says("echo x > /opt/site/pack.py")
            assert "Read-only" in await says("rm -rf /srv/logs; touch /usr/bin/new")
            assert (
                await says("touch /tests/x /logs/y && ls /tests /logs") == "/logs:\ny\n\n/tests:\nx"
            )
            assert await says("ls /root /home") != ""
            assert await says("echo b >> a.txt; git diff --stat | tail -n 1")
            diff = await sandbox.capture_diff()
            assert b"+b\n" in diff
        finally:
            await sandbox.destroy()

    with_backend(tmp_path, scenario)
    assert (Path(prepared.rootfs) / "opt/cache/pack.whl").read_text() == SECRET


PROGRAM = """
import json, os, subprocess
with open("/logs/from_python", "w") as file:
    file.write("x")
said = subprocess.run(["image-tool"], capture_output=True, text=True).stdout
os.write(report_fd, json.dumps([os.getcwd(), data["repo"], said, os.listdir("/srv/logs")]).encode())
"""


def test_programs_of_ours_run_beside_it_and_see_the_same(
    prepared: PreparedRepository, tmp_path: Path
) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        sandbox = await backend.create(await backend.prepare(prepared))
        try:
            code = compile(PROGRAM, "program", "exec")
            result = await sandbox.run_python(code, {}, 20.0)
            assert result.report == b'["/testbed", "/testbed", "of the image\\n", []]', result
        finally:
            await sandbox.destroy()

    with_backend(tmp_path, scenario)


def test_many_at_once_and_two_images_do_not_mix(
    prepared: PreparedRepository, tmp_path: Path
) -> None:
    plain = replace(prepared, rootfs="", writable=(), workdir="/app")

    async def one(backend: SandboxBackend, repository: PreparedRepository) -> str:
        sandbox = await backend.create(await backend.prepare(repository))
        try:
            return (await sandbox.run("pwd; image-tool 2>/dev/null; true")).output
        finally:
            await sandbox.destroy()

    async def scenario(backend: SandboxBackend) -> None:
        said = await asyncio.gather(*(one(backend, r) for r in (prepared, plain) * 4))
        assert said == ["/testbed\nof the image\n", "/app\n"] * 4

    with_backend(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workdir": "/usr/src/app", "rootfs": ""}, "without its unpacked image"),
        ({"workdir": "/proc/x"}, "/proc/x of a task cannot be a folder of its own"),
        ({"workdir": "/testbed/../etc"}, "cannot be a folder of its own"),
        ({"workdir": "/tmp"}, "cannot be a folder of its own"),
        ({"writable": ("/dev/shm",)}, "/dev/shm of a task cannot be"),
        ({"rootfs": "/nowhere"}, "the unpacked image /nowhere: "),
    ],
)
def test_a_place_that_cannot_be_given_is_a_sentence(
    prepared: PreparedRepository, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        template = await backend.prepare(replace(prepared, **changes))
        with pytest.raises(SandboxError, match=said):
            await backend.create(template)

    with_backend(tmp_path, scenario)


def test_a_weak_sandbox_says_that_it_cannot(prepared: PreparedRepository, tmp_path: Path) -> None:
    async def whole() -> None:
        try:
            backend = await open_backend("weak", LIMITS, tmp_path, "weak")
        except SandboxError as error:
            pytest.skip(f"no weak sandbox here: {error}")
        try:
            template = await backend.prepare(prepared)
            with pytest.raises(SandboxError, match="allowed for it: namespaces, docker, podman"):
                await backend.create(template)
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_changes_leave_out_what_a_hidden_folder_covers(prepared: PreparedRepository) -> None:
    overlay = Path(prepared.folder) / "overlay"
    assert changes_in(overlay) == (
        Change(path="/opt/cache/pack.whl", source=None),
        Change(path="/opt/site/pack.py", source=overlay / "opt/site/pack.py"),
        Change(path="/srv/logs", source=None, is_folder=True),
        Change(path="/srv/private/fix", source=None),
    )
    assert changes_in(overlay / "none") == ()


def test_engines_are_given_one_mount_per_change_whatever_the_name(tmp_path: Path) -> None:
    odd = 'opt/a,b "c":d.py'
    (tmp_path / "opt").mkdir()
    (tmp_path / odd).write_text("x")
    mark_hidden(tmp_path, "/srv/x", kind=IS_FOLDER)
    words = list(engine_mounts(changes_in(tmp_path), overlay="/t/overlay", static="/s"))
    assert words == [
        "--mount",
        'type=bind,"source=/t/overlay/opt/a,b ""c"":d.py","target=/opt/a,b ""c"":d.py",ro',
        "--mount",
        "type=bind,source=/s/nothing,target=/srv/x,ro",
    ]


def bubblewrap_engine(spec: ContainerSpec, inside: list[str]) -> list[str]:
    """An engine whose images are folders."""
    prefix = bubblewrap.interpreter_prefix()
    image = image_arguments(
        Path(spec.image), spec.image, (spec.repo, prefix, *spec.writable), must_be_public=False
    )
    overlay = bubblewrap_mounts(
        spec.changes, overlay=f"{spec.template}/overlay", static=spec.static
    )
    fixed = bubblewrap.fixed_arguments(
        spec.program,
        static=spec.static,
        prefix=prefix,
        limits=spec.limits,
        is_root_outside=os.geteuid() == 0,
        system=[*image, *overlay],
        repo=spec.repo,
        writable=spec.writable,
    )
    template = ["--ro-bind", spec.template, bubblewrap.BASE, "--remount-ro", "/"]
    return [*fixed, *template, "--chdir", "/", "--", *inside]


def test_the_container_backend_starts_each_task_in_its_own_image_under_its_overlay(
    prepared: PreparedRepository, tmp_path: Path
) -> None:
    asked: list[ContainerSpec] = []

    def command(spec: ContainerSpec, inside: list[str]) -> list[str]:
        asked.append(spec)
        return bubblewrap_engine(spec, inside)

    task = replace(prepared, image=prepared.rootfs)

    async def whole() -> None:
        folder = tmp_path / "engine"
        make_folder(folder)
        backend = ContainerBackend(
            name="stdio",
            engine=Engine(command=command, has_exec=False, install=""),
            program=str(bubblewrap.find_bwrap()),
            image=None,
            limits=LIMITS,
            folder=folder,
            run_id="images",
        )
        try:
            await backend.open()
            assert asked == []  # Without a common image there is nothing to look at yet.
            sandbox = await backend.create(await backend.prepare(task))
            found = await sandbox.run(f"pwd; image-tool; cat a.txt; grep -rl '{SECRET}' /opt /srv")
            assert found.output == "/testbed\nof the image\na\n"
            await sandbox.destroy()
            await (await backend.create(await backend.prepare(task))).destroy()
            no_image = await backend.prepare(replace(task, image="", workdir="/other"))
            with pytest.raises(SandboxError, match="the task names no image; set sandbox"):
                await backend.create(no_image)
        finally:
            await backend.close()

    try:
        bubblewrap.find_bwrap()
    except SandboxError as error:
        pytest.skip(str(error))
    asyncio.run(asyncio.wait_for(whole(), 120))
    # PATH, a look around, two sandboxes: the image is looked at once.
    assert [spec.repo for spec in asked] == ["/repo", "/repo", "/testbed", "/testbed"]
    assert [len(spec.changes) for spec in asked] == [0, 0, 4, 4]


def test_docker_covers_what_the_overlay_hides_and_gives_the_tasks_folders(tmp_path: Path) -> None:
    (tmp_path / "overlay/opt").mkdir(parents=True)
    (tmp_path / "overlay/opt/a.py").write_text("x")
    mark_hidden(tmp_path / "overlay", "/logs.old", kind=IS_FOLDER)
    mark_hidden(tmp_path / "overlay", "/opt/b.whl", kind=IS_FILE)
    spec = ContainerSpec(
        program="docker",
        image="hub/task:1",
        name="n",
        run_id="r",
        static="/s",
        template="/t",
        limits=LIMITS,
        repo="/testbed",
        writable=("/tests",),
        changes=changes_in(tmp_path / "overlay"),
    )
    line = docker_command(spec, ["/bin/bash", "x"])
    tmpfs = [line[at + 1].partition(":")[0] for at, word in enumerate(line) if word == "--tmpfs"]
    assert tmpfs == ["/testbed", "/tmp", "/tests"]
    mounts = [line[at + 1] for at, word in enumerate(line) if word == "--mount"]
    assert mounts == [
        "type=bind,source=/s/nothing,target=/logs.old,ro",
        "type=bind,source=/t/overlay/opt/a.py,target=/opt/a.py,ro",
        "type=bind,source=/s/empty,target=/opt/b.whl,ro",
    ]
    assert line[-3:] == ["/bin/bash", "hub/task:1", "x"]
    other = apptainer_command(spec, ["/bin/bash", "x"])
    scratch = [other[at + 1] for at, word in enumerate(other) if word == "--scratch"]
    assert scratch == ["/testbed", "/tmp", "/tests"]
    assert [other[at + 1] for at, word in enumerate(other) if word == "--mount"] == mounts


def test_more_changes_than_a_command_line_can_name_are_a_sentence(tmp_path: Path) -> None:
    many = tuple(Change(path=f"/srv/{n}", source=None) for n in range(MAX_MOUNTS + 1))
    with pytest.raises(SandboxError, match=r"2501 paths of the unpacked image .*; allowed: 2500"):
        reachable(many, tmp_path)
    assert len(reachable(many[:3], tmp_path)) == 3
