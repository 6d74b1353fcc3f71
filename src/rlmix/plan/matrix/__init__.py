"""The rows of the capability matrix, by what they are about.

To add a fact, add a `Row` to the file of its theme: what it is about (`when`), what was seen
(`reason`), where anybody can read it (`source`), and, when it refuses, what works `instead`.
"""

from rlmix.plan.matrix.attention import ROWS as ATTENTION_ROWS
from rlmix.plan.matrix.cpu import ROWS as CPU_ROWS
from rlmix.plan.matrix.experts import ROWS as EXPERT_ROWS
from rlmix.plan.matrix.formats import ROWS as FORMAT_ROWS
from rlmix.plan.matrix.recurrent import ROWS as RECURRENT_ROWS
from rlmix.plan.matrix.seen import ROWS as SEEN_ROWS

ROWS = ATTENTION_ROWS + EXPERT_ROWS + FORMAT_ROWS + RECURRENT_ROWS + CPU_ROWS + SEEN_ROWS
