# Drafts a reply's next tokens from its own text: what followed the last few tokens where they stood before (prompt
# lookup, Saxena 2023). Quoting, editing and repeating replies gain from it; it needs no second model.

from __future__ import annotations

from array import array

TOKEN = 4  # bytes
MATCH = 3 * TOKEN  # a place is of interest if it ends with the same three tokens as the text
LONGEST_MATCH = 16 * TOKEN  # beyond which two matches count as equal
PLACES = 8  # that are compared
WINDOW = 4096 * TOKEN  # of the text, its end, that is searched


def find_drafts(text: bytearray, count: int) -> tuple[int, ...]:
    """Draft up to ``count`` tokens after ``text``, int32 each: what followed its longest match, of equal ones the last.

    A match that reaches into the text's end is taken for the beginning of a repetition. Empty if nothing matches.
    """
    end = len(text)
    first, last = max(0, end - WINDOW), end - TOKEN
    needle = text[-MATCH:]
    best, best_length = 0, 0
    places = 0
    found = text.rfind(needle, first, last) if end > MATCH else -1
    while found >= 0 and places < PLACES and best_length < LONGEST_MATCH:
        if found % TOKEN == 0:
            places += 1
            length = _match_length(text, found + MATCH, first)
            if length > best_length:
                best, best_length = found + MATCH, length
        found = text.rfind(needle, first, found + MATCH - 1)
    if not best:
        return ()
    drafts = array("i", bytes(text[best : best + count * TOKEN]))
    period = len(drafts)
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return tuple(drafts)


def _match_length(text: bytearray, place: int, first: int) -> int:
    """Return how many bytes before ``place`` equal the text's last ones."""
    end, length = len(text), MATCH
    while length < LONGEST_MATCH and place - length - TOKEN >= first:
        further = length + TOKEN
        if text[place - further : place - length] != text[end - further : end - length]:
            break
        length = further
    return length
