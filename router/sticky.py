# Which kind of model a conversation needs. It keeps its kind unless the difficulty clearly changes: what earlier
# turns were judged follows from the conversation itself, so any gateway finds the same, and nothing is remembered.

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from protocol.chat import ChatRequest
from protocol.inference import Request
from router.catalog.targets import ComplexityDecision

MARGIN = 0.04  # of score: closer than this to the quality asked, a turn changes nothing
MOST_TURNS = 6  # earlier ones that are looked at

Score = Callable[[Request], float]  # the probability that a small model suffices


def judge(request: Request, quality: float, score: Score) -> ComplexityDecision:
    """Return whether the chance that a small model suffices reaches ``quality``, with a margin between turns.

    A turn within the margin leaves the conversation as it was, so the newest turn beyond it decides. The last that is
    looked at is the first of all, which decides by the quality alone: for it stays the same however long it wavers.
    """
    first = found = score(request)
    if abs(found - quality) >= MARGIN or not isinstance(request, ChatRequest):
        return ComplexityDecision(found >= quality, first, quality, 0)
    earlier, back = turns_of(request)[:-1], 0
    for turn in reversed([*earlier[:1], *earlier[1:][1 - MOST_TURNS :]]):
        found = score(as_asked(request, turn))
        back = len(earlier) - earlier.index(turn)
        if abs(found - quality) >= MARGIN:
            break
    return ComplexityDecision(found >= quality, first, quality, back)


def turns_of(request: ChatRequest) -> list[int]:
    """Return where in the messages the user's turns stand."""
    return [place for place, message in enumerate(request.messages) if message.role == "user"]


def as_asked(request: ChatRequest, turn: int) -> ChatRequest:
    """Return the conversation as it was when the user's turn at this place was its last message."""
    return replace(request, messages=request.messages[: turn + 1])
