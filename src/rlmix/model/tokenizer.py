"""Our small tokenizer: whole words where they are frequent, single characters elsewhere.

Text is first cut into words (with the space or underscore before them), single digits and single
signs; no piece crosses such a cut. Every text can be encoded: printable ASCII has its characters,
everything else goes by UTF-8 bytes. Encoding is deterministic and needs no merges table.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN = "<|pad|>", "<|unk|>"
USER, ASSISTANT, BASH, TOOL, END = "<|user|>", "<|assistant|>", "<|bash|>", "<|tool|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNKNOWN, USER, ASSISTANT, BASH, TOOL, END)

WORD_PATTERN = (
    r" ?[A-Za-z]+|_[A-Za-z]+|[0-9]| ?-[A-Za-z]+[0-9]?|[<>=!+\-]=| =(?!=)| \*\.py|\.py"
    r"| ?&&| [\"']|/'|\n| +|[^A-Za-z0-9 \n]"
)
"""Where text is cut before pieces are looked up."""

WORD_SCORE, CHARACTER_SCORE, BYTE_SCORE = -1.0, -10.0, -100.0
"""Log-scores: a word piece beats any spelling of the same text by characters."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ '<|user|>' + message.content + '<|end|>' }}"
    "{%- elif message.role == 'tool' %}{{ '<|tool|>' + message.content + '<|end|>' }}"
    "{%- elif message.tool_calls %}"
    "{%- for call in message.tool_calls %}"
    "{{ '<|assistant|><|bash|>' + call.function.arguments.command + '<|end|>' }}"
    "{%- endfor %}"
    "{%- else %}{{ '<|assistant|>' + message.content + '<|end|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{ '<|assistant|>' + ('<|bash|>' if tools else '') }}"
    "{%- endif %}"
)
"""A bash call is the assistant's turn after `<|bash|>`; the tool's answer follows `<|tool|>`."""


def frequent_words(texts: Iterable[str], *, min_count: int) -> list[str]:
    """Cuts of two or more characters seen at least `min_count` times, most frequent first."""
    pattern = re.compile(WORD_PATTERN)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(cut for cut in pattern.findall(text) if len(cut) > 1)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, count in ranked if count >= min_count]


def build_tokenizer(words: list[str]) -> "Tokenizer":
    """Tokenizer with the special tokens, `words`, single characters and bytes, in this order."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = ["\n", "\t", *(chr(code) for code in range(32, 127))]
    pieces: list[tuple[str, float]] = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(word, WORD_SCORE) for word in words]
    pieces += [(char, CHARACTER_SCORE) for char in characters]
    spelled = {char.encode() for char in characters}
    pieces += [
        (f"<0x{value:02X}>", BYTE_SCORE) for value in range(256) if bytes([value]) not in spelled
    ]
    tokenizer = Tokenizer(
        models.Unigram(pieces, unk_id=SPECIAL_TOKENS.index(UNKNOWN), byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", folder: Path) -> None:
    """Writes the three files that transformers and `ChatRenderer` read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
