"""Numbers of file formats that outlive the program that wrote them: `MAJOR.MINOR`.

A reader takes every minor number of its major one: fields that it does not know are passed over.
A major number grows when that would read something wrong. Pure.
"""

import re

from rlmix.core.errors import VersionError

_FORM = re.compile(r"(\d{1,9})\.(\d{1,9})")


def require_readable(found: object, *, known: str, where: object) -> None:
    """Refuse what this program would misread.

    Args:
        found: the file's `schema_version`.
        known: the one that this program writes.
        where: the file, for the message.
    Raises:
        VersionError: another major number, or none.
    """
    form = _FORM.fullmatch(found) if isinstance(found, str) else None
    if form is None:
        raise VersionError(
            f"{where}: schema_version is {found!r}; this rlmix reads {known}; the file is damaged, "
            "or was written before formats had numbers, by a version that can still read it"
        )
    major = int(form[1])
    ours = int(known.split(".")[0])
    if major != ours:
        age, way_out = (
            ("a newer", "install the newer rlmix")
            if major > ours
            else ("an older", "use the rlmix that wrote it; the run's manifest.json names it")
        )
        raise VersionError(
            f"{where}: schema_version is {found}, written by {age} rlmix; this one reads {ours}.x; "
            f"{way_out}"
        )
