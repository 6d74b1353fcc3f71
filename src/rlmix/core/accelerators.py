"""The names that one accelerator goes by.

Clouds, drivers and Ray spell the same chip differently. Configuration has one name for each, in
lower case with underscores; `canonical` finds it wherever a user or a driver names a chip.
"""

import re
from collections.abc import Iterable

ALIASES = {
    "b300_sxm": "b300",
    "b300_sxm6": "b300",
    "b200_sxm": "b200",
    "h200_sxm": "h200",
    "h200_141gb": "h200",
    "h100_sxm": "h100",
    "h100_sxm5": "h100",
    "h100_80gb": "h100",
    "h100_80gb_hbm3": "h100",
    "a100_80g": "a100",
    "a100_80gb": "a100",
    "a100_sxm4_80gb": "a100",
    "a100_sxm_80gb": "a100",
    "rtxpro6000": "rtx_pro_6000",
    "pro_6000": "rtx_pro_6000",
    "rtx_pro_6000_se": "rtx_pro_6000",
    "rtx_pro_6000_we": "rtx_pro_6000",
    "rtx_pro_6000_blackwell": "rtx_pro_6000",
    "rtx_pro_6000_blackwell_server_edition": "rtx_pro_6000",
    "rtx_pro_6000_blackwell_workstation_edition": "rtx_pro_6000",
    "910c": "ascend_910c",
    "ascend910c": "ascend_910c",
    "ascend910_93": "ascend_910c",
    "atlas_a3": "ascend_910c",
}
"""Spelling after `_plain` -> name. An A100 with 40 GB is another chip and is not in here."""


def canonical(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` means, whatever its case, dashes, vendor and memory size.

    Args:
        name: e.g. `H100!` (a cloud's "exactly this chip"), `A100-80G`, `NVIDIA B200`.
        known: names that exist; they win over aliases.
    Returns:
        One of `known`, or None when none is meant.
    """
    plain = _plain(name)
    by_plain = {_plain(candidate): candidate for candidate in known}
    return by_plain.get(plain) or by_plain.get(ALIASES.get(plain, plain))


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return words.removeprefix("nvidia_").removeprefix("huawei_")
