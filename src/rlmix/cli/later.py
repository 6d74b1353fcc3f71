"""Commands whose work a later version brings. They exist so that scripts and people get a clear
answer, and so that their names are taken; each says in one sentence what is missing."""

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, Overrides
from rlmix.core.errors import PlanError


@answered
def diff_logprobs(overrides: Overrides = None, as_json: AsJson = False) -> Answer:
    """Compare trainer and pools (later version)."""
    raise PlanError(
        "diff-logprobs: arrives with the attribution of numeric differences; in this version "
        "metrics.jsonl has the mismatch of every pool at every step (mismatch/by_pool/...)"
    )
