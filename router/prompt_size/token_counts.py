# How many tokens a text has at the most: by the model's own tokenizer where that is known and there, else by a bound
# that holds for those of the field, else by its bytes.

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from router.prompt_size.text_bounds import bytes_most, text_tokens_most

ENCODINGS = ("o200k_base", "cl100k_base")  # OpenAI's, as the optional package ``rs-bpe`` carries them
BYTES = "bytes"  # in place of a tokenizer: whatever it is, it makes no more tokens than bytes
# The tokenizer of Claude from 4.7 on is not public. It makes up to 1.47 times the tokens of the one before on prose and
# documents (as count_tokens has told), whose 4.3 characters to a token of English the bound is calibrated for.
NEWER_CLAUDE = "claude-4-7"
NEWER_CLAUDE_MORE = 1.75
# By how the names of OpenAI's models begin. Newer ones may come with another encoding: the bound is for them.
_OPENAI = (
    (r"(chatgpt-4o|gpt-4o|gpt-4\.1|gpt-4\.5|gpt-5(-|$)|o[134](-|$))", "o200k_base"),
    (r"(gpt-4(-|$)|gpt-3\.5-turbo|text-embedding-(3-|ada-002))", "cl100k_base"),
)
SLICE = 32_768  # characters that a tokenizer is given at once, so that none runs slowly
EDGE = 8  # tokens more than the whole that the slices of a text may be short of, each


def tokens_most(text: str, tokenizer: str | None) -> int:
    """Return a number of tokens that ``text`` never exceeds, by a tokenizer; ``None``: by any of the field."""
    if tokenizer is None:
        return text_tokens_most(text)
    return counter_of(tokenizer)(text)


def encoding_of(model: str) -> str | None:
    """Return the encoding of one of OpenAI's models, if it is known and there."""
    name = model.rpartition("/")[2].lower()
    encoding = next((encoding for begins, encoding in _OPENAI if re.match(begins, name)), None)
    return encoding if encoding is not None and find_spec("rs_bpe") is not None else None


@cache
def counter_of(tokenizer: str) -> Callable[[str], int]:
    """Return what counts by one of the names above, or by a ``tokenizer.json`` at a path.

    Raises ImportError where the package for it is missing, and whatever reading the file raises.
    """
    if tokenizer == BYTES:
        return bytes_most
    if tokenizer == NEWER_CLAUDE:
        return lambda text: math.ceil(text_tokens_most(text) * NEWER_CLAUDE_MORE)
    if tokenizer in ENCODINGS:
        return _clean(getattr(import_module("rs_bpe.bpe").openai, tokenizer)().count)
    read = import_module("tokenizers").Tokenizer.from_file(tokenizer)
    added = read.get_added_tokens_decoder()
    # What a caller writes of control tokens is text to the engine: at most a token for each of its bytes. Any token
    # that a vocabulary adds may be one, special or not.
    spelt = [(token_id, token.content) for token_id, token in added.items() if not token.content.isspace()]
    control = {token_id: len(content.encode()) for token_id, content in spelt}

    def count(text: str) -> int:
        ids = read.encode(text, add_special_tokens=False).ids
        return len(ids) if control.keys().isdisjoint(ids) else sum(control.get(token_id, 1) for token_id in ids)

    return _sliced(count)


def _clean(count: Callable[[str], int]) -> Callable[[str], int]:
    """Return ``count`` for texts with surrogates, too: those travel as question marks."""
    return lambda text: count(text if text.isascii() else text.encode("utf-8", "replace").decode())


def _sliced(count: Callable[[str], int]) -> Callable[[str], int]:
    def count_slices(text: str) -> int:
        slices = [text[start : start + SLICE] for start in range(0, len(text), SLICE)]
        return sum(map(_clean(count), slices)) + EDGE * max(0, len(slices) - 1)

    return count_slices
