"""Asks a running SGLang server for logprobs: as it decodes, and of the same tokens as a prompt.

The server must serve the weights that the trainer loads; whether it does shows in the numbers only.
Logprobs of prompts are not divided by a temperature, so everything is asked at temperature 1.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from rlmix.core.errors import EngineError
from rlmix.diff.dump_files import Dumped
from rlmix.diff.texts import Recorded
from rlmix.engine.client import EngineClient
from rlmix.model.chat import ChatRenderer
from rlmix.tasks.generate import build_task

ANSWER_LIMIT_S = 300.0
"""For one text, on a CPU that decodes a few tokens a second."""


def record(
    url: str, model: Path, *, sessions: int, tokens: int
) -> tuple[list[Dumped], dict[str, np.ndarray]]:
    """Texts that a server decoded, and text name -> its logprobs of the same tokens as a prompt.

    Raises:
        EngineError: no answer, or one without logprobs.
    """
    return asyncio.run(_record(url, model, sessions=sessions, tokens=tokens))


async def _record(
    url: str, model: Path, *, sessions: int, tokens: int
) -> tuple[list[Dumped], dict[str, np.ndarray]]:
    renderer = ChatRenderer(model)
    client = EngineClient(url, timeout_s=ANSWER_LIMIT_S)
    try:
        issues = [build_task(split="eval", seed=0, index=i).public.issue for i in range(sessions)]
        asked = [
            _one(client, list(renderer.prompt_ids(issue)), number, tokens)
            for number, issue in enumerate(issues)
        ]
        answers = await asyncio.gather(*asked)
    finally:
        await client.close()
    return [dumped for dumped, _ in answers], {d.recorded.name: row for d, row in answers}


async def _one(
    client: EngineClient, prompt: list[int], number: int, tokens: int
) -> tuple[Dumped, np.ndarray]:
    name = f"server/{number}"
    # All of them, or a checkpoint's generation_config.json may fill in the rest.
    sampling: dict[str, Any] = {
        "max_new_tokens": tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "sampling_seed": number,
    }
    answer = await client.post_json(
        "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    )
    output = [int(token) for token in _told(answer, name, "output_ids")]
    decoded = _chosen(_told(answer, name, "meta_info"), "output_token_logprobs", output, name)
    ids = [*prompt, *output]
    again = await client.post_json(
        "/generate",
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )
    read = _chosen(_told(again, name, "meta_info"), "input_token_logprobs", ids, name)
    recorded = Recorded(
        name=name,
        pool="server",
        ids=tuple(ids),
        sampled=tuple(range(len(prompt), len(ids))),
        logprobs_P=decoded,
    )
    dumped = Dumped(recorded=recorded, trainer_P=None, temperature=1.0, top_p=None, top_k=None)
    return dumped, read[len(prompt) :]


def _told(answer: dict[str, Any], name: str, key: str) -> Any:
    if key not in answer:
        raise EngineError(f"diff: {name}: the server's answer has no {key}")
    return answer[key]


def _chosen(meta: dict[str, Any], key: str, ids: list[int], name: str) -> np.ndarray:
    """float32 logprobs of rows (logprob, id, text); a text's first token has none and gets 0."""
    rows = _told(meta, name, key)
    if [int(row[1]) for row in rows] != ids:
        raise EngineError(f"diff: {name}: {key} are of other tokens than those asked about")
    return np.array([0.0 if row[0] is None else row[0] for row in rows], dtype=np.float32)
