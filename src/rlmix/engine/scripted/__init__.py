"""A fake engine: real HTTP in the engine's shapes, tokens and logprobs from a script.

For tests of everything that talks to an engine, and for trying a fleet without a model. Tokens
come from a policy, a pure function of the call; faults are injected by name, and each is answered
exactly as often as it was asked for.
"""

from rlmix.engine.scripted.faults import FAULTS
from rlmix.engine.scripted.policies import (
    HashPolicy,
    Policy,
    ScriptedCall,
    ScriptedReply,
    certain_reply,
    turns_policy,
)
from rlmix.engine.scripted.server import ScriptedEngine

__all__ = [
    "FAULTS",
    "HashPolicy",
    "Policy",
    "ScriptedCall",
    "ScriptedEngine",
    "ScriptedReply",
    "certain_reply",
    "turns_policy",
]
