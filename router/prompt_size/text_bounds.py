# How many tokens a text has at the most, with any tokenizer of the field: a bound that is calibrated on nine of them
# (tools/complexity_training/text_bounds.py) and holds for text that was made to have many. It rests on what their
# vocabularies share:
#
#   - a word that each of them has whole, with the space before it, is one token;
#   - other words: where two letters are a token in each of them, no tokenizer leaves the two apart. So no two tokens of
#     one letter stand side by side but where they are no such pair: k letters with b such places make (2 k + 1 + b) / 3
#     tokens at the most;
#   - a character beyond ASCII has the most tokens that any of them makes of it, else its bytes; where that is one for
#     three bytes, a space before it may take its first byte, and leaves two. A few tokens join the last byte of one
#     character to the next one's first: each leaves one token more. Claude's normalizer (NFKC) writes some out, and
#     puts marks into letters and takes others out, so that a letter and its marks are its bytes taken apart;
#   - runs of spaces are few tokens; digits, punctuation and other white space are one each.
#
# Merges across those borders can cost a token more than either side alone: MARGIN is for that.

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache, lru_cache
from importlib.resources import files
from string import ascii_letters
from typing import NamedTuple

MARGIN = 16  # one token more for so many
EDGE = 4  # tokens more for any text: begin marks, and the space that some tokenizers put before it
SPACES = re.compile(r"  +")
SPACES_A_TOKEN = 12  # in a run of them, beyond its first two tokens
RUNS = re.compile(r" ?[A-Za-z]+")  # words of a text in ASCII,
MIXED = re.compile(r" ?[A-Za-z\x80-\U0010ffff]+")  # and of any other: what touches another script is no known word
MARKS = "\u0300-\u036f"  # that NFKC puts into letters: "é" and a dot below are "ẹ" and an acute, of a byte more
MARKED = re.compile(f"[^{MARKS}]?[{MARKS}]+")
OTHERS = re.compile(f"(?:[A-Za-z](?=[{MARKS}])|[^\x00-\x7f])+")
BLANKS = " \xa0\u2000-\u200a\u202f\u205f\u3000"  # the space, and what NFKC makes one
# The first byte of a character that some token joins to the last one before it, and both characters are fewer tokens by
# themselves: a Hebrew letter after what is none, and some Hangul and ideographs.
JOINED = re.compile(
    rb"(?s)[\xd7\xe7\xec\xed](?<=[^\xd7][\x90\x91\x94\x9e]\xd7|.[\xa0\xbd]\xe7|.[\x84\xb0]\xec|.[\xa0\xa4]\xed)"
)


class Shared(NamedTuple):
    """What the vocabularies share."""

    words: frozenset[str]  # that are one token, as they stand: with a space before them, or after anything but a letter
    strange: re.Pattern[str]  # matches the first of two letters that are no token
    cheap: tuple[tuple[re.Pattern[str], int], ...]  # characters that make fewer tokens than bytes, and how many fewer
    torn: re.Pattern[str]  # matches a blank and a character of three bytes that is one token without the space
    longer: dict[str, int]  # characters that NFKC writes with more bytes, and how many more
    is_longer: re.Pattern[str]  # matches each of them


def text_tokens_most(text: str) -> int:
    """Return a number of tokens that ``text`` never exceeds, with any tokenizer that works on bytes or falls back to
    them."""
    shared = shared_by_vocabularies()
    runs = (RUNS if text.isascii() else MIXED).findall(text)
    unknown = [run for run in runs if run not in shared.words]
    tokens = len(text) - sum(map(len, runs)) + len(runs) - len(unknown)
    for spaces in SPACES.findall(text):
        tokens -= max(0, len(spaces) - 3 - len(spaces) // SPACES_A_TOKEN)  # the last may be a word's
    if unknown:
        tokens += _tokens_of_words("\n".join(unknown), len(unknown), shared)
    return tokens + tokens // MARGIN + EDGE


def bytes_most(text: str) -> int:
    """Return a number of bytes that no tokenizer is given more of: those of ``text``, as NFKC leaves it if that is
    longer."""
    if text.isascii():
        return len(text)
    return len(text.encode("utf-8", "surrogatepass")) + _written_out(text, shared_by_vocabularies())


@cache
def shared_by_vocabularies() -> Shared:
    """Read what ships with the package."""
    found = json.loads((files("router") / "prompt_size" / "artifacts" / "text_bounds.json").read_bytes())
    strangers: dict[str, str] = {}  # first letters by those that may not follow
    for first in " " + ascii_letters:
        others = "".join(letter for letter in ascii_letters if letter not in found["pairs"].get(first, ""))
        strangers[others] = strangers.get(others, "") + first
    strange = "|".join(f"[{firsts}](?=[{others}])" for others, firsts in strangers.items() if others)
    cheap = tuple(
        (re.compile(f"[{re.escape(characters)}]+"), int(saved)) for saved, characters in found["cheap"].items()
    )
    torn = re.compile(f"[{BLANKS}][{re.escape(found['cheap']['2'])}]")
    words = frozenset(f" {word}" for word in found["spaced"].split()) | frozenset(found["bare"].split())
    longer = {character: int(more) for more, characters in found["longer"].items() for character in characters}
    return Shared(words, re.compile(strange), cheap, torn, longer, re.compile(f"[{''.join(longer)}]"))


def _tokens_of_words(words: str, count: int, shared: Shared) -> int:
    """Return the most tokens of ``count`` words, each on a line, of which nothing is known."""
    letters, parts, tokens = len(words) - (count - 1), count, 0
    if not words.isascii():
        pieces = OTHERS.findall(words)
        others = "".join(pieces)
        encoded = others.encode("utf-8", "surrogatepass")
        tokens = len(encoded) + len(JOINED.findall(encoded)) + _written_out(others, shared)
        unmarked = MARKED.sub("", others)
        for characters, saved in shared.cheap:
            tokens -= saved * sum(map(len, characters.findall(unmarked)))
        tokens += len(shared.torn.findall(words))
        letters, parts = letters - len(others), parts + len(pieces)
    strange = len(shared.strange.findall(words))
    return tokens + min(letters, -(-(2 * letters + parts + strange) // 3))


def _written_out(text: str, shared: Shared) -> int:
    """Return how many bytes more a text may have once NFKC has written its characters out."""
    longer = sum([shared.longer[character] for character in shared.is_longer.findall(text)])
    return longer + sum([_taken_apart(marked[0]) for marked in MARKED.findall(text)])


@lru_cache(maxsize=1024)
def _taken_apart(letter: str) -> int:
    """Return how many bytes more a letter has, once a mark after it has taken its own marks out of it."""
    forms = (letter, unicodedata.normalize("NFKC", letter), unicodedata.normalize("NFKD", letter))
    *together, apart = (len(form.encode("utf-8", "surrogatepass")) for form in forms)
    return max(0, apart - max(together))
