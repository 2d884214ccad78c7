# A conversation keeps its kind of model unless the difficulty clearly changes.

from __future__ import annotations

import pytest

from protocol.chat import ChatRequest, Message
from protocol.completions import CompletionRequest
from protocol.inference import Request
from router.sticky import MARGIN, MOST_TURNS, judge

QUALITY = 0.8
CLOSE = MARGIN / 2


def conversation(*scores: float) -> ChatRequest:
    """A conversation whose user turns are their own scores, an answer after each but the last."""
    messages: list[Message] = [Message(role="system", content="Be kind.")]
    for score in scores:
        messages += [Message(role="user", content=str(score)), Message(role="assistant", content="So.")]
    return ChatRequest(model="auto", messages=tuple(messages[:-1]))


def score_of(request: Request) -> float:
    assert isinstance(request, ChatRequest)
    return float(next(message.text() for message in reversed(request.messages) if message.role == "user"))


@pytest.mark.parametrize(
    ("scores", "is_small", "turns_back"),
    [
        ((QUALITY + CLOSE,), True, 0),
        ((QUALITY - CLOSE,), False, 0),
        ((0.95, QUALITY - CLOSE), True, 1),
        ((0.3, QUALITY + CLOSE), False, 1),
        ((0.3, QUALITY + CLOSE, QUALITY - CLOSE), False, 2),
        ((0.3, 0.95, QUALITY - CLOSE), True, 1),
        ((0.95, 0.3), False, 0),
        ((0.3, 0.95), True, 0),
    ],
)
def test_only_a_clear_change_moves_a_thread(scores: tuple[float, ...], is_small: bool, turns_back: int) -> None:
    """The newest turn that is clearly above or below the quality decides; the first one decides by itself."""
    decision = judge(conversation(*scores), QUALITY, score_of)

    assert (decision.is_small, decision.turns_back, decision.score) == (is_small, turns_back, scores[-1])


@pytest.mark.parametrize("begun", [0.95, 0.3, QUALITY + CLOSE, QUALITY - CLOSE])
def test_a_thread_that_wavers_never_flips(begun: float) -> None:
    """However long scores waver about the quality, each turn goes where the one before it went, to the hundredth."""
    scores = [begun, *(QUALITY + (CLOSE if place % 2 else -CLOSE) for place in range(100))]
    decisions = [judge(conversation(*scores[: place + 1]), QUALITY, score_of) for place in range(len(scores))]

    assert {decision.is_small for decision in decisions} == {begun >= QUALITY}
    assert [decision.turns_back for decision in decisions] == list(range(101))


def test_a_turn_that_was_clear_is_forgotten_once() -> None:
    """When it is too far back the conversation goes on as it began, and wavers no more for it."""
    scores = [QUALITY + CLOSE, 0.3, *(QUALITY + (CLOSE if place % 2 else -CLOSE) for place in range(50))]
    kinds = [judge(conversation(*scores[: place + 1]), QUALITY, score_of).is_small for place in range(len(scores))]

    assert kinds == [True] + [False] * MOST_TURNS + [True] * (51 - MOST_TURNS)


def test_what_is_looked_at_is_bounded() -> None:
    """A conversation of a thousand turns costs no more than one of a few."""
    asked = []

    def counted(request: Request) -> float:
        asked.append(request)
        return QUALITY

    judge(conversation(*[QUALITY] * 1_000), QUALITY, counted)

    assert len(asked) == MOST_TURNS + 1


def test_results_of_tools_are_no_turns() -> None:
    """While an agent works, what its user asked decides, as it did when it was asked."""
    asked = conversation(0.3, QUALITY + CLOSE)
    working = ChatRequest(
        model="auto", messages=(*asked.messages, Message(role="tool", content="42", tool_call_id="call"))
    )

    assert judge(working, QUALITY, score_of) == judge(asked, QUALITY, score_of)
    assert judge(CompletionRequest(model="auto", prompt="Once"), QUALITY, lambda _: QUALITY).turns_back == 0
