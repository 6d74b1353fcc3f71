"""The policy with its head in small blocks, as large vocabularies have it."""

from rlmix.algos.chunked_head import head_scores
from rlmix.trainer.policy import Policy


class InBlocks(Policy):
    """Takes no shortcut for few scores; blocks divide neither tokens nor vocabulary."""

    def scores(self, hidden_PH, ids_PK, is_slot_PK=None, *, temperature, is_exact=False):
        return head_scores(
            hidden_PH,
            self._head.weight,
            ids_PK,
            temperature=temperature,
            bias_V=self._head.bias,
            is_slot_PK=is_slot_PK,
            token_chunk=13,
            vocab_chunk=100,
            whole_scores=0,
            kept_scores=0 if is_exact else 3_000,  # Some of the blocks.
        )
