"""Commands whose work a later version brings. They exist so that scripts and people get a clear
answer, and so that their names are taken; each says in one sentence what is missing."""

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, Overrides
from rlmix.core.errors import PlanError

scale_app = typer.Typer(help="Change the pools of a run (later version).", no_args_is_help=True)


@scale_app.callback()
def _scale() -> None:
    """Keeps `pools` a command of its own name."""


@scale_app.command("pools")
@answered
def scale_pools(overrides: Overrides = None, as_json: AsJson = False) -> Answer:
    """Show or change the pools of a run (later version)."""
    raise PlanError(
        "scale pools: arrives with live scaling; in this version the number of replicas is set at "
        "the start (pools.NAME.replicas)"
    )


@answered
def diff_logprobs(overrides: Overrides = None, as_json: AsJson = False) -> Answer:
    """Compare trainer and pools (later version)."""
    raise PlanError(
        "diff-logprobs: arrives with the attribution of numeric differences; in this version "
        "metrics.jsonl has the mismatch of every pool at every step (mismatch/by_pool/...)"
    )
