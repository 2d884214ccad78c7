# How improbable a text is, passage by passage: what optimisers append to a request ("describing.\ + similarlyNow write
# oppositeley.]( Me") has words and signs of many tongues that follow each other as nothing does that is written, be it
# prose, code, a log or a hash. A table knows how surprising each sign is after the two before it; letters with accents
# count as those without, letters of other alphabets by their alphabet, so that no language is surprising in itself.
# A small network reads, of each passage, how often signs of which kind follow which, and how surprising that was.

from __future__ import annotations

import unicodedata

import numpy as np
import numpy.typing as npt

WINDOW, STEP = 160, 80  # characters of a passage, and between the beginnings of two
SYMBOLS = 128
SPACE, LOWER, UPPER, DIGIT, SIGN, LETTER = range(6)  # LETTER: of an alphabet without Latin's letters
KINDS = 6
STEPS = 8  # of a bit: surprise is kept in whole steps, 16 bits at the most
SURPRISING = (6.0, 8.0, 10.0, 13.0)  # bits from where on a sign counts as surprising
FEATURES = 2 * KINDS * KINDS + len(SURPRISING) + 6

Floats = npt.NDArray[np.float32]

# Alphabets and kinds of sign beyond ASCII, each one symbol: from, to, the symbol.
_RANGES = (
    *((0x80, 0xBF, 98), (0xC0, 0x24F, 99), (0x250, 0x36F, 98), (0x370, 0x3FF, 100), (0x400, 0x52F, 101)),
    *((0x530, 0x58F, 102), (0x590, 0x5FF, 103), (0x600, 0x6FF, 104), (0x900, 0xDFF, 105), (0xE00, 0xE7F, 106)),
    *((0x1E00, 0x1EFF, 99), (0x2000, 0x206F, 107), (0x2070, 0x2BFF, 108), (0x3000, 0x303F, 109)),
    *((0x3040, 0x30FF, 110), (0x3100, 0x9FFF, 111), (0xAC00, 0xD7AF, 112), (0xFF00, 0xFFEF, 109)),
    (0x1F000, 0x1FFFF, 113),
)
_OTHER = 97
_LAST = 0x1FFFF


def _symbols() -> npt.NDArray[np.uint8]:
    table = np.full(_LAST + 1, _OTHER, np.uint8)
    table[:128] = np.maximum(np.arange(128), 31) - 31
    for first, last, symbol in _RANGES:
        table[first : last + 1] = symbol
    for code in (*range(0xC0, 0x250), *range(0x1E00, 0x1F00)):
        base = unicodedata.normalize("NFKD", chr(code))[0]
        if base.isascii() and base.isalpha():
            table[code] = ord(base) - 31
    return table


def _kinds() -> npt.NDArray[np.int64]:
    kinds = np.full(SYMBOLS, SIGN)
    kinds[:2] = SPACE
    for first, last, kind in (("a", "z", LOWER), ("A", "Z", UPPER), ("0", "9", DIGIT)):
        kinds[ord(first) - 31 : ord(last) - 30] = kind
    kinds[99] = LOWER
    kinds[[*range(100, 107), *range(110, 113)]] = LETTER
    return kinds


_SYMBOLS, _KINDS = _symbols(), _kinds()


def symbols_of(text: str) -> npt.NDArray[np.int64]:
    """Return a text as symbols, two spaces before it."""
    codes = np.frombuffer(("  " + text).encode("utf-32-le", "replace"), np.uint32)
    return _SYMBOLS.take(np.minimum(codes, _LAST)).astype(np.int64)


def triples_of(symbols: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return each symbol but the first two with those before it, as a place in a table."""
    return (symbols[:-2] * SYMBOLS + symbols[1:-1]) * SYMBOLS + symbols[2:]


def passages_of(symbols: npt.NDArray[np.int64], bits: Floats) -> Floats:
    """Return (passages, FEATURES): what is known of the form of each passage of a text; ``bits``: how surprising each
    symbol is."""
    length = len(bits)
    kinds = _KINDS.take(symbols[1:])
    pairs = kinds[:-1] * KINDS + kinds[1:]
    blocks = max(1, -(-length // STEP))
    block = np.arange(length) // STEP
    cells, width = block * (KINDS * KINDS) + pairs, blocks * KINDS * KINDS
    often = np.bincount(cells, minlength=width).reshape(blocks, -1)
    surprise = np.bincount(cells, bits, width).reshape(blocks, -1)
    high = np.stack([np.bincount(block, bits > least, blocks) for least in SURPRISING], axis=1)
    again = np.bincount(block, symbols[2:] == symbols[1:-1], blocks)
    there = np.bincount(block * SYMBOLS + symbols[2:], minlength=blocks * SYMBOLS).reshape(blocks, -1) > 0
    if blocks > 1:  # a passage is two blocks, the last one the last two
        often, surprise, high, again = (one[:-1] + one[1:] for one in (often, surprise, high, again))
        there = there[:-1] | there[1:]
    size = np.maximum(often.sum(axis=1, keepdims=True), 40)
    level = surprise.sum(axis=1) / size[:, 0]
    usual = np.median(level)
    read: Floats = np.hstack(
        (
            *(often / size, surprise / np.maximum(often, 2), high / size, again[:, None] / size),
            *(there.sum(axis=1, keepdims=True) / 100, there[:, _KINDS == SIGN].sum(axis=1, keepdims=True) / 30),
            *(level[:, None], (level - usual)[:, None], size / WINDOW),
        )
    ).astype(np.float32)
    return read


class Surprise:
    """The fitted table and network, ready to judge."""

    def __init__(self, weights: dict[str, npt.NDArray]) -> None:
        seen = np.cumsum(weights["surprise_gaps"].astype(np.int64))
        pairs = weights["surprise_pairs"].astype(np.int64)  # (symbols * symbols,): steps after one symbol
        open_ends = weights["surprise_contexts"].astype(np.int64)  # (the same,): steps more where two came before
        table = open_ends[:, None].reshape(SYMBOLS, SYMBOLS, 1) + pairs.reshape(SYMBOLS, SYMBOLS)[None]
        table = np.minimum(table, 16 * STEPS - 1).astype(np.uint8).ravel()
        table[seen] = weights["surprise_steps"]
        self._bits = np.arange(16 * STEPS, dtype=np.float32) / STEPS
        self._table = table
        self._into = weights["surprise_in"].astype(np.float32)  # (FEATURES, hidden)
        self._hidden = weights["surprise_hidden"].astype(np.float32)
        self._out = weights["surprise_out"].astype(np.float32)
        self._bias = float(weights["surprise_bias"])  # the operating point taken off

    def bits(self, symbols: npt.NDArray[np.int64]) -> Floats:
        """Return how surprising each symbol but the first two is."""
        return self._bits.take(self._table.take(triples_of(symbols)))

    def logit(self, text: str) -> float:
        """Return the highest logit of any passage: above 0 it is what nothing writes but an optimiser."""
        symbols = symbols_of(text)
        if len(symbols) < WINDOW // 4:  # nothing can be said of so little
            return -np.inf
        hidden = passages_of(symbols, self.bits(symbols)) @ self._into
        hidden += self._hidden
        return float((np.maximum(hidden, 0, out=hidden) @ self._out).max() + self._bias)
