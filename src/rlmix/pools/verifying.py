"""Asks an engine what `pools.probes` judges: one for each replica, in the replica's process."""

import itertools
from collections.abc import Sequence

from rlmix.core.errors import EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import EngineRefused, GenerationAborted
from rlmix.pools.probes import PROBE_TOKENS, SamplingProbe, check_sampling, probe_requests
from rlmix.pools.spec import AdmissionRefused

SHORT_TOKENS = 2
"""Of the probe after an update."""
PROBE_LIMIT_S = 60.0
"""For one probe turn on an engine that may still be warming up, or is busy."""


class Verifier:
    """Probes of one engine, in its own words."""

    def __init__(
        self, url: str, *, name: str, token: str | None, admin_token: str | None = None
    ) -> None:
        self._url = url
        self._name = name
        self._token = token
        self._admin_token = token if admin_token is None else admin_token
        self._numbers = itertools.count(1)

    async def check_sampling(
        self, prompt_ids: Sequence[int], *, version: int, is_short: bool
    ) -> None:
        """Logprob, mask and version probe.

        Raises:
            AdmissionRefused: an answer contradicts itself, or the distribution it should come from.
            EngineError: no answer.
        """
        requests = probe_requests(
            prompt_ids,
            name=self._name,
            number=next(self._numbers),
            num_tokens=SHORT_TOKENS if is_short else PROBE_TOKENS,
        )
        client = EngineClient(self._url, token=self._token, timeout_s=PROBE_LIMIT_S)
        try:
            answers = [await client.generate(request) for request in requests]
        except (EngineRefused, GenerationAborted):
            raise
        except EngineError as error:
            if isinstance(error.__cause__, ValueError | KeyError | TypeError | IndexError):
                # It answered, and the answer was no turn: see `engine.answers`.
                raise AdmissionRefused(f"pools: {self._name}: mask probe: {error}") from error
            raise
        finally:
            await client.close()
        probe = SamplingProbe(at_one=answers[0], at_temperature=answers[1])
        check_sampling(probe, version=version, name=self._name)

    async def checksum(self) -> str:
        """Of the weights that the engine serves, over its own layout; "" where it has none."""
        client = EngineClient(self._url, token=self._admin_token, timeout_s=PROBE_LIMIT_S)
        try:
            answer = await client.post_json("/weights_checker", {"action": "checksum"})
        except EngineRefused:
            return ""
        finally:
            await client.close()
        return str(answer.get("per_engine_checksum") or "")
