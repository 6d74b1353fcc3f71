"""Turns a session into token ids through the model's own chat template, one delta at a time.

Invariant: ids only grow. What was sampled is never encoded again, and the concatenation of the
prompt, the sampled ids and the observations equals the template's rendering of the whole session.
Text from issues and tools never becomes a special token, whatever it contains.
"""

import json
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs one bash command in the repository.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}

# Stand for message contents while the template renders; private-use characters that a template
# has no reason to contain.
_ISSUE, _COMMAND, _OUTPUT = "\ue0f0", "\ue0f1", "\ue0f2"


class ChatRenderer:
    """Renders one model's sessions. Loads tokenizer and template only; neither torch nor
    transformers."""

    def __init__(self, model_dir: str | Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        folder = Path(model_dir)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if not (folder / name).is_file():
                raise DataError(f"model: {folder} has no {name}; give a Hugging Face model folder")
        self._template_side = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # A second instance, because the switch is state of the tokenizer and not of the call.
        self._content_side = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._content_side.encode_special_tokens = True
        config = json.loads((folder / "tokenizer_config.json").read_text())
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text())
        end_token = config["eos_token"]
        end_id = self._template_side.token_to_id(end_token)
        if end_id is None:
            raise DataError(f"model: eos_token {end_token!r} is not in {folder}/tokenizer.json")
        self._end_id: int = end_id
        self.stop_token_ids: tuple[int, ...] = (end_id,)
        self.vocab_size: int = self._template_side.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(self._template_side.get_added_tokens_decoder())
        self._prompt_parts = self._render_parts(self._messages(num_turns=0))
        whole = self._render(self._messages(num_turns=1))
        before = self._render(self._messages(num_turns=0))
        if not whole.startswith(before + _COMMAND):
            raise DataError(
                f"model: the chat template of {folder} changes earlier text when a turn is added; "
                "sessions need a template that only appends"
            )
        # Between a command and the next: end of turn, tool header, output, next prompt.
        self._observation_text = whole[len(before) + len(_COMMAND) :]
        head, tail = self._observation_text.split(_OUTPUT)
        self._observation_head = self._template_ids(head)
        self._observation_tail = self._template_ids(tail)
        if self._observation_head[:1] != [end_id]:
            raise DataError(f"model: a bash turn does not end with {end_token!r} in {folder}")

    @staticmethod
    def _messages(*, num_turns: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": _ISSUE}]
        for _ in range(num_turns):
            call = {"type": "function", "function": {"name": "bash", "arguments": {}}}
            call["function"]["arguments"] = {"command": _COMMAND}  # type: ignore[index]
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": _OUTPUT})
        return messages

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._template.render(
            messages=messages, tools=[BASH_TOOL], add_generation_prompt=True
        )

    def _template_ids(self, text: str) -> list[int]:
        return self._template_side.encode(text, add_special_tokens=False).ids

    def content_ids(self, text: str) -> list[int]:
        """Ids of plain text; a special token's name in it is spelled out."""
        return self._content_side.encode(text, add_special_tokens=False).ids

    def content_text(self, ids: list[int]) -> str:
        """Inverse of `content_ids`; special tokens appear by their names."""
        return self._content_side.decode(ids, skip_special_tokens=False)

    def _render_parts(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        head, tail = self._render(messages).split(_ISSUE)
        return self._template_ids(head), self._template_ids(tail)

    def prompt_ids(self, issue: str) -> list[int]:
        """Ids of a new session, ending where the first command starts."""
        head, tail = self._prompt_parts
        return [*head, *self.content_ids(issue), *tail]

    def observation_ids(self, exit_code: int, output: str, *, ended_with_stop: bool) -> list[int]:
        """Ids to append after a turn's sampled ids, ending where the next command starts.

        `ended_with_stop` says whether the sampled ids already hold the end token.
        """
        head = self._observation_head[1:] if ended_with_stop else self._observation_head
        body = self.content_ids(tool_text(exit_code, output))
        return [*head, *body, *self._observation_tail]

    def command(self, output_ids: list[int] | tuple[int, ...]) -> str | None:
        """The bash command of a sampled turn; None when it is empty, cut off, or holds special
        tokens."""
        ids = list(output_ids)
        if not ids or ids[-1] != self._end_id:
            return None
        body = ids[:-1]
        if not body or not self._special_ids.isdisjoint(body):
            return None
        text = self.content_text(body)
        return text if text.strip() else None


def tool_text(exit_code: int, output: str) -> str:
    """Content of the tool message: exit code, then the output on its own lines."""
    return f"{exit_code}\n{output}"
