# Which kind of model a conversation needs. A thread keeps its kind unless the difficulty clearly changes: what earlier
# turns were judged follows from the conversation itself, so any gateway finds the same, and nothing is remembered.

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from protocol.chat import ChatRequest
from router.abilities import InferenceRequest
from router.targets import Verdict

MARGIN = 0.04  # of score: closer than this to the quality asked, a turn changes nothing
MOST_TURNS = 6  # earlier ones that are looked at

Score = Callable[[InferenceRequest], float]


def judge(request: InferenceRequest, quality: float, score: Score) -> Verdict:
    """Return whether the chance that a small model suffices reaches ``quality``, with a margin between turns.

    A turn within the margin leaves the thread as it was, so the newest turn beyond it decides; where there is none,
    the earliest that is looked at does, by the quality alone.
    """
    first = found = score(request)
    back = 0
    while abs(found - quality) < MARGIN and back < MOST_TURNS and (earlier := before_last_turn(request)) is not None:
        request = earlier
        found = score(request)
        back += 1
    return Verdict(found >= quality, first, quality, back)


def before_last_turn(request: InferenceRequest) -> ChatRequest | None:
    """Return the conversation as it was asked one user turn ago, if it had one."""
    if not isinstance(request, ChatRequest):
        return None
    ends = [place for place, message in enumerate(request.messages) if message.role == "user"]
    return replace(request, messages=request.messages[: ends[-2] + 1]) if len(ends) > 1 else None
