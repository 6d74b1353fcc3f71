"""Files that last: a newer minor version is read, another major one is refused in one sentence."""

import pytest

from rlmix.core.errors import VersionError
from rlmix.core.schema_version import require_readable


@pytest.mark.parametrize("found", ["2.0", "2.7", "2.13"])
def test_every_minor_version_of_the_same_major_is_read(found: str) -> None:
    require_readable(found, known="2.7", where="a.json")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("3.0", "a.json: schema_version is 3.0, written by a newer rlmix; this one reads 2.x; "
                "install the newer rlmix"),
        ("10.1", "written by a newer rlmix"),
        ("1.9", "written by an older rlmix; this one reads 2.x"),
    ],
)  # fmt: skip
def test_another_major_version_is_refused_with_what_to_do(found: str, said: str) -> None:
    with pytest.raises(VersionError) as caught:
        require_readable(found, known="2.7", where="a.json")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", [None, 2, 2.7, "2", "2.7.1", "v2.7", "2.x", "", ["2.7"]])
def test_what_is_no_version_is_refused(found: object) -> None:
    with pytest.raises(VersionError, match=r"a\.json: schema_version is .*reads 2\.7"):
        require_readable(found, known="2.7", where="a.json")
