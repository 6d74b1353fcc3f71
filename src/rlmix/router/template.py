"""OpenAI-style messages to token ids and back, by a model's own chat template.

Invariant: what was sampled is never encoded again. Content of messages never becomes a special
token, whatever it contains, unless the template rewrites the content itself.
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
"""Private-use characters around a message's number, which stands for its content while the template
renders."""
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

Message = dict[str, Any]


class ChatTemplate:
    """One model's tokenizer and template; neither torch nor transformers."""

    def __init__(self, model_dir: Path) -> None:
        """
        Raises:
            DataError: a file is missing or says no end token.
        """
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (model_dir / name).is_file():
                raise DataError(f"router: --model {model_dir} has no {name}")
        tokenizer_file = str(model_dir / "tokenizer.json")
        self._template_side = Tokenizer.from_file(tokenizer_file)
        # A second instance, because the switch is state of the tokenizer and not of the call.
        self._content_side = Tokenizer.from_file(tokenizer_file)
        self._content_side.encode_special_tokens = True
        config = json.loads((model_dir / "tokenizer_config.json").read_text())
        path = model_dir / "chat_template.jinja"
        self.source: str = path.read_text() if path.is_file() else config.get("chat_template", "")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._template = environment.from_string(self.source)
        self._specials = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        self.end_text = self._specials["eos_token"]
        end_id = self._template_side.token_to_id(self.end_text) if self.end_text else None
        if end_id is None:
            raise DataError(f"router: --model {model_dir}: eos_token is not in tokenizer.json")
        self.stop_token_ids = tuple(dict.fromkeys([end_id, *_generation_ends(model_dir)]))
        self.vocab_size: int = self._template_side.get_vocab_size(with_added_tokens=True)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """Ids of a conversation, ending where the model goes on.

        Raises:
            ValueError: the template refuses the messages.
        """
        real = self._render(messages, tools)
        marked = self._render(
            [{**m, "content": _mark(i)} if m.get("content") else m for i, m in enumerate(messages)],
            tools,
        )
        for clean in (str, str.strip):
            contents = [clean(m.get("content") or "") for m in messages]
            if _MARK.sub(_filler(contents), marked) == real:
                return self._encode(marked, contents)
        return self._template_ids(real)

    def next_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        num_known: int,
        ended_with_stop: bool,
    ) -> list[int] | None:
        """Ids to append after the last sampled ids, ending where the model goes on.

        Args:
            num_known: messages that the ids so far stand for; the last of them was sampled.
            ended_with_stop: the sampled ids already hold the end token.
        Returns:
            None when the template does not show that turn where it was.
        """
        marked_messages = []
        for i, message in enumerate(messages):
            if i == num_known - 1:
                marked_messages.append({"role": "assistant", "content": _mark(i)})
            elif message.get("content"):
                marked_messages.append({**message, "content": _mark(i)})
            else:
                marked_messages.append(message)
        marked = self._render(marked_messages, tools)
        _, mark, tail = marked.partition(_mark(num_known - 1))
        if not mark:
            return None
        if ended_with_stop:
            if not tail.startswith(self.end_text):
                return None
            tail = tail.removeprefix(self.end_text)
        return self._encode(tail, [m.get("content") or "" for m in messages])

    def text_ids(self, text: str) -> list[int]:
        """Ids of plain text; a special token's name in it is spelled out."""
        return list(self._content_side.encode(text, add_special_tokens=False).ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """What a client reads: without special tokens."""
        return str(self._template_side.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        return str(self._template_side.decode([token], skip_special_tokens=False))

    def _encode(self, marked: str, contents: Sequence[str]) -> list[int]:
        ids: list[int] = []
        position = 0
        for found in _MARK.finditer(marked):
            ids += self._template_ids(marked[position : found.start()])
            ids += self.text_ids(contents[int(found[1])])
            position = found.end()
        return ids + self._template_ids(marked[position:])

    def _template_ids(self, text: str) -> list[int]:
        return list(self._template_side.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        try:
            return str(
                self._template.render(
                    messages=messages,
                    tools=tools or None,
                    add_generation_prompt=True,
                    **self._specials,
                )
            )
        except Exception as error:  # Whatever a template does with what a client sent.
            raise ValueError(f"the chat template refuses the messages: {error}") from None


def normal_message(message: Any) -> Message:
    """A message as templates want it and as it is compared: text content, parsed arguments,
    nothing that is null.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages: each must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ValueError("messages: content may be text or a list of text parts")
            parts.append(part["text"])
        content = "".join(parts)
    if content is not None and not isinstance(content, str):
        raise ValueError("messages: content may be text or a list of text parts")
    normal: Message = {"role": message["role"], "content": content or ""}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            normal[key] = message[key]
    calls = message.get("tool_calls")
    if calls:
        normal["tool_calls"] = [_normal_call(call) for call in calls]
    return normal


def _normal_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        name = str(function["name"])
    except (KeyError, TypeError):
        raise ValueError("messages: a tool call needs function.name and .arguments") from None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {"arguments": arguments}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _filler(contents: Sequence[str]) -> Callable[[re.Match[str]], str]:
    return lambda found: contents[int(found[1])]


def _mark(index: int) -> str:
    return f"{_OPEN}{index}{_CLOSE}"


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _generation_ends(model_dir: Path) -> list[int]:
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return []
    ends = json.loads(path.read_text()).get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise ValueError(message)
