"""Tool calls in sampled text, in the three ways in which models here write them. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parsed = tuple[str, list[tuple[str, dict[str, Any]]]]
"""(text outside of calls, [(function, arguments)])."""

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_none(text: str, tools: Sequence[Any]) -> Parsed:
    return text, []


def parse_bash(text: str, tools: Sequence[Any]) -> Parsed:
    """The whole turn is one command for the first tool."""
    if not tools or not text.strip():
        return text, []
    function = tools[0].get("function", {}) if isinstance(tools[0], Mapping) else {}
    parameters = function.get("parameters", {}).get("properties", {}) or {"command": {}}
    return "", [(str(function.get("name", "bash")), {next(iter(parameters)): text})]


def parse_json(text: str, tools: Sequence[Any]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; a block that is no such object
    stays text."""
    calls = []
    for found in _BLOCK.finditer(text):
        try:
            document = json.loads(found[1])
            calls.append((str(document["name"]), dict(document.get("arguments") or {})))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            return text, []
    return (_BLOCK.sub("", text).strip(), calls) if calls else (text, [])


def parse_xml(text: str, tools: Sequence[Any]) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    calls = []
    for block in _BLOCK.finditer(text):
        function = _FUNCTION.search(block[1])
        if function is None:
            return text, []
        calls.append((function[1].strip(), dict(_PARAMETER.findall(function[2]))))
    return (_BLOCK.sub("", text).strip(), calls) if calls else (text, [])


PARSERS: Mapping[str, Callable[[str, Sequence[Any]], Parsed]] = {
    "none": parse_none,
    "bash": parse_bash,
    "json": parse_json,
    "xml": parse_xml,
}


def parser_for(template: str) -> str:
    """Name of the parser that a chat template calls for."""
    if "<function=" in template:
        return "xml"
    if "<tool_call>" in template:
        return "json"
    return "bash" if "<|bash|>" in template else "none"
