"""Names of the headers that the router reads and writes.

Those that the engine's protocol has as well are spelled as in `rlmix.engine.protocol`, which is not
imported because it loads numpy; a test compares them.
"""

SESSION = "X-Session-Id"
GROUP = "X-Group-Id"
"""Of the session's group, for `router.placement`."""
MIN_VERSION = "X-Min-Version"
REQUEST_ID = "X-Request-Id"
"""Made when it is missing; the replica and the answer carry it too."""
TIMEOUT = "X-Timeout-S"
"""Seconds that the sender waits for this answer from when it sent it; each hop passes on what is
left."""
DEADLINE = "X-Deadline-S"
"""Seconds after which the session's sample is worth little; earlier ones get places first."""
KEEP_ALIVE = "X-Keep-Alive-S"
"""Asks for a byte at least that often, so that nothing in between takes a slow turn for a dead one.
The status is then 200 from the first such byte on; an error is in the body."""

POOL = "X-Rlmix-Pool"
REPLICA = "X-Rlmix-Replica"
NUMERICS = "X-Rlmix-Numerics"
REHOMED = "X-Rlmix-Rehomed"
SHARD = "X-Rlmix-Shard"
"""URL of the shard that owns the session; later requests may go there directly."""
FORWARDED = "X-Rlmix-Forwarded"
"""Set by a shard that passes a request on to the owner, which must not pass it on again."""
