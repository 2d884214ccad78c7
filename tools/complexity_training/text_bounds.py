# Calibrates the bound on the tokens of a text: finds what the vocabularies of public tokenizers share, writes
# prompt_size/artifacts/text_bounds.json, and says how far the bound lies above each of them.
#
#   python -m tools.complexity_training.text_bounds WORDS NAME=FILE…
#
# WORDS is a text whose words are candidates. A FILE is a tokenizer.json, a *.tiktoken or *.model with ranks (the
# pattern of cl100k splits text for it, with "1:" before the path that of Qwen, with single digits), or "sp:" and a
# SentencePiece model; NAME alone is an encoding that rs-bpe carries. It needs tiktoken, tokenizers and sentencepiece.

from __future__ import annotations

import base64
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from string import ascii_letters
from typing import Any

from router.prompt_size.text_bounds import shared_by_vocabularies, text_tokens_most
from router.prompt_size.token_counts import ENCODINGS, counter_of

Count = Callable[[str], int]
Counts = Mapping[str, Count]

OUTPUT = Path(__file__).parents[2] / "router" / "prompt_size" / "artifacts" / "text_bounds.json"
SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main(words: str, *named: str) -> None:
    """Calibrate, write and report."""
    counts = {name: _counter(path or name) for name, _, path in (each.partition("=") for each in named)}
    text = Path(words).read_text()
    OUTPUT.write_text(json.dumps(calibrate(sorted(set(re.findall(r"[A-Za-z]{2,}", text))), counts)) + "\n")
    shared_by_vocabularies.cache_clear()
    for name, count in counts.items():
        sys.stdout.write(f"{name}: {text_tokens_most(text) / count(text):.2f} times its tokens of {words}\n")


def calibrate(words: list[str], counts: Counts) -> dict[str, Any]:
    """Return what all vocabularies share: words, pairs of letters, and characters of fewer tokens than bytes."""

    def added(text: str, after: str = "\n") -> int:
        return max(count(after + text) - count(after) for count in counts.values())

    pairs = {
        first: "".join(
            second for second in ascii_letters if (added(second, "a ") if first == " " else added(first + second)) < 2
        )
        for first in " " + ascii_letters
    }
    cheap: dict[int, str] = {}
    for character in filter(_is_assigned, map(chr, range(0x80, 0x10000))):
        size = len(character.encode())
        if (saved := size - max(1, added(character), added(character, "a"))) > 0:
            cheap[saved] = cheap.get(saved, "") + character
    return {
        "spaced": " ".join(word for word in words if max(added(" " + word, "a"), added(" " + word)) == 1),
        "bare": " ".join(word for word in words if max(added(word), added(word, "(")) == 1),
        "pairs": pairs,
        "cheap": cheap,
        "longer": longer(),
    }


def longer() -> dict[int, str]:
    """Return the characters that NFKC, which Claude's tokenizer begins with, writes with more bytes."""
    found: dict[int, str] = {}
    for character in map(chr, (*range(0x80, 0xD800), *range(0xE000, 0x110000))):
        more = len(unicodedata.normalize("NFKC", character).encode()) - len(character.encode())
        if more > 0:
            found[more] = found.get(more, "") + character
    return found


def _is_assigned(character: str) -> bool:
    return unicodedata.category(character) not in ("Cn", "Co", "Cs")


def _counter(path: str) -> Count:
    if path in ENCODINGS or path.endswith(".json"):
        return counter_of(path)
    if path.startswith("sp:"):
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=path.removeprefix("sp:"))
        return lambda text: len(model.encode(text))
    import tiktoken

    splits = SPLITS.replace("{1,3}", "") if path.startswith("1:") else SPLITS
    lines = (line.split() for line in Path(path.removeprefix("1:")).read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    encoding = tiktoken.Encoding(path, pat_str=splits, mergeable_ranks=ranks, special_tokens={})
    return lambda text: len(encoding.encode_ordinary(text))


if __name__ == "__main__":
    partial(main, *sys.argv[1:])()
