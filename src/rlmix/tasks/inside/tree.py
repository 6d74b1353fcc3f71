"""Files below a folder that somebody hostile filled: no symlink is ever followed."""

import os


def files_below(root):
    """Relative paths of files and symlinks, without following any, without the top's .git."""
    found, waiting = [], [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if path == ".git":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    found.append(path)
    return found


def write_file(root, path, content, mode):
    """Write below `root`; whatever stands in the way and is no real folder is removed."""
    target = clear_way(root, path)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    os.chmod(target, mode)


def clear_way(root, path):
    """Make the folders of `path` real ones and its place free; returns the place."""
    parts = path.split("/")
    here = root
    for part in parts[:-1]:
        here = os.path.join(here, part)
        if os.path.islink(here) or not os.path.isdir(here):
            if os.path.lexists(here):
                os.unlink(here)
            os.mkdir(here)
    target = os.path.join(here, parts[-1])
    remove(target)
    return target


def remove(target):
    """Remove a file, a symlink or a whole folder, if there is one."""
    if os.path.isdir(target) and not os.path.islink(target):
        with os.scandir(target) as entries:
            for entry in list(entries):
                remove(entry.path)
        os.rmdir(target)
    elif os.path.lexists(target):
        os.unlink(target)


def read_bytes(root, path):
    """Content of a regular file below `root`; None when it is missing or anything else."""
    here = root
    for part in path.split("/")[:-1]:
        here = os.path.join(here, part)
        if os.path.islink(here):
            return None
    target = os.path.join(root, path)
    if os.path.islink(target) or not os.path.isfile(target):
        return None
    with open(target, "rb") as file:
        return file.read()
