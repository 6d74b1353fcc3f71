"""`rlmix doctor`: what this machine or cluster can and cannot do, each with its fix."""

from typing import TYPE_CHECKING

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.loop.doctor import Diagnosis


@answered
def doctor(
    overrides: Overrides = None, conf_dir: ConfDir = None, as_json: AsJson = False
) -> Answer:
    """What this machine or cluster can and cannot do, with the fix.

    Takes the keys of `rlmix train`, and looks for what such a run needs.

    \b
    rlmix doctor                                           this machine
    rlmix doctor launch.address=auto run.dir=/shared/runs  every machine of a Ray cluster
    """
    from rlmix.config.compose import load_config
    from rlmix.loop.doctor import diagnose

    config = load_config("train", list(overrides or []), extra_dir=conf_dir).config
    found = diagnose(config)
    return Answer(
        document=found.to_dict(),
        view=lambda: _view(found),
        code=ExitCode.GOOD if found.can_train else ExitCode.CHECK_FAILED,
    )


def _view(found: "Diagnosis") -> "RenderableType":
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    has_several = len({finding.node for finding in found.findings}) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", *(["machine"] if has_several else []), "what", "found", "fix"):
        table.add_column(name, overflow="fold")
    for finding in found.findings:
        good = ("ok", "green") if finding.ok else ("no", "red" if finding.is_needed else "yellow")
        table.add_row(
            Text(*good),
            *([finding.node] if has_several else []),
            finding.name,
            Text(finding.detail),
            "" if finding.ok else finding.fix,
        )
    verdict = "can run here." if found.can_train else "cannot run here yet."
    return Group(table, Text(f"`rlmix train` {verdict}", style="bold"))
