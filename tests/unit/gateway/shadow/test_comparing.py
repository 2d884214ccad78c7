# What an answer to a shadow call's question says: the same words, a judge's word, or nothing that counts.

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest

from gateway.batch.results import response_of
from gateway.shadow.comparer import found_of
from gateway.shadow.judging import LONGEST_SHOWN, are_same, judge_request, verdict_of
from gateway.shadow.store import Asked
from protocol.chat import ChatRequest, Message
from protocol.decoding import decode_with_extra
from router.catalog.catalog import AutoRoute, Catalog, ShadowTraffic
from tests.support.house import model

EVEN, ODD = UUID(int=2), UUID(int=3)  # the small model's answer stands first, or second
QUESTION = ChatRequest(model="auto", messages=(Message(role="user", content="Which river?"),))


def catalog(judge: str | None = None) -> Catalog:
    """A catalogue whose route holds a share back."""
    shadow = ShadowTraffic(share=0.1, budget_nanousd=10**9, judge=judge)
    auto = AutoRoute(small=("small",), large=("large",), shadow=shadow)
    return Catalog({name: model(name) for name in ("small", "large")}, {}, {"auto": auto}, {}, {})


def asked(answer: bytes | None, *, status: str = "asked", request_id: UUID = EVEN, is_explored: bool = False) -> Asked:
    """A shadow call, answered "The Seine." by the small model, or by the large one where it is explored."""
    return Asked(
        request_id=request_id,
        route="auto",
        status=status,
        body=msgspec.json.encode(msgspec.to_builtins(QUESTION) | {"quality": 1.0, "max_cost_usd": "0.01"}),
        answer=b"The Seine.",
        is_explored=is_explored,
        asked_nanousd=5_000 if status == "judging" else 0,
        reserved_nanousd=90_000,
        item_status="failed" if answer is None else "completed",
        response=answer,
    )


def reply(text: str | None, model_used: str = "large") -> bytes:
    """A batch item's response that cost 5,000 nano-dollars."""
    body: dict[str, Any] = {
        "model_used": model_used,
        "choices": [{"message": {"content": text}}],
        "usage": {"cost_usd": 0.000005},
    }
    return response_of(200, "id", msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("large", "is_same"), [("the seine", True), ("The  Seine!", True), ("The Rhine.", False), ("Seine", False)]
)
def test_without_a_judge_the_words_decide(large: str, is_same: bool) -> None:
    """Case, spaces and punctuation say nothing; any other word does."""
    found = found_of(asked(reply(large)), catalog())

    assert (found.status, found.suffices, found.model, found.asked_nanousd) == (
        "compared",
        is_same,
        "large",
        5_000,
    )


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("**42**", "42.", True),
        ('"Yes" (it is)', "yes, it is!", True),
        ("答案是 42。", "答案是 42", True),
        ("-5", "5", False),
        ("3.14", "3 14", False),
        (".5", "5", False),
        ("1/2", "1:2", False),
        ("x+1", "x-1", False),
        ("a <= b", "a >= b", False),
        ("50%", "50", False),
        ("f(x)", "fx", False),
        ("?", "!", False),
        ("...", "...", True),
    ],
)
def test_signs_that_change_an_answer_are_no_punctuation(one: str, other: str, is_same: bool) -> None:
    """A small model's -5 is not as good as 5; what merely stands around words says nothing."""
    assert are_same(one, other) is are_same(other, one) is is_same


@pytest.mark.parametrize(
    ("request_id", "first", "second"), [(EVEN, "The Seine.", "Rhine"), (ODD, "Rhine", "The Seine.")]
)
def test_a_judge_is_asked_about_different_words(request_id: UUID, first: str, second: str) -> None:
    """It sees the request and both answers in drawn order, and may cost what is left of the reserve."""
    found = found_of(asked(reply("Rhine"), request_id=request_id), catalog("large"))
    assert found.body is not None
    question, extra = decode_with_extra(found.body, ChatRequest)
    text = question.messages[1].text()

    assert (found.status, question.model, extra) == ("to_judge", "large", {"max_cost_usd": "0.000085"})
    assert (
        text.index("Which river?") < text.index(f"[first answer]\n{first}") < text.index(f"[second answer]\n{second}")
    )
    assert found_of(asked(reply("the seine")), catalog("large")).status == "compared"


@pytest.mark.parametrize(
    ("request_id", "said", "suffices"),
    [
        (EVEN, "FIRST", True),
        (EVEN, "SECOND", False),
        (ODD, "FIRST", False),
        (ODD, "SECOND.", True),
        (ODD, "I say: SAME", True),
        (EVEN, "FIRST or SECOND", None),
        (EVEN, "Neither", None),
        (EVEN, "", None),
    ],
)
def test_a_judges_word_decides(request_id: UUID, said: str, suffices: bool | None) -> None:
    """The small model suffices unless the large one's answer is called better; what is unclear does not count."""
    found = found_of(asked(reply(said), status="judging", request_id=request_id), catalog("large"))

    assert found.suffices is suffices
    assert (found.status, found.reason) == (("dropped", "unclear") if suffices is None else ("compared", None))
    assert (found.asked_nanousd, found.judge_nanousd) == (0, 5_000)


@pytest.mark.parametrize(
    ("request_id", "first", "second"), [(EVEN, "Rhine", "The Seine."), (ODD, "The Seine.", "Rhine")]
)
def test_of_an_explored_call_the_answers_change_places(request_id: UUID, first: str, second: str) -> None:
    """The caller had the large model's answer; what was asked since is the small one's, which may suffice."""
    found = found_of(asked(reply("Rhine", "small"), request_id=request_id, is_explored=True), catalog("large"))
    assert found.body is not None
    text = decode_with_extra(found.body, ChatRequest)[0].messages[1].text()
    judged = found_of(asked(reply("FIRST"), status="judging", is_explored=True), catalog("large"))
    same, strange = (found_of(asked(reply("the seine", by), is_explored=True), catalog()) for by in ("small", "large"))

    assert text.index(f"[first answer]\n{first}") < text.index(f"[second answer]\n{second}")
    assert (found.model, found.asked_nanousd, judged.suffices, judged.judge_nanousd) == ("small", 5_000, True, 5_000)
    assert (same.status, same.suffices, strange.status, strange.reason) == ("compared", True, "dropped", "not_small")


@pytest.mark.parametrize(
    ("answer", "reason", "cost"),
    [
        (None, "not_answered", 0),
        (response_of(429, "id", b'{"error":{"code":"quota_exhausted"}}'), "not_answered", 0),
        (response_of(400, "id", b'{"error":{"code":"content_policy_violation"}}'), "not_answered", 90_000),
        (reply("The Seine.", model_used="small"), "not_large", 5_000),
        (reply(None), "no_text", 5_000),
    ],
)
def test_what_cannot_be_compared_is_dropped(answer: bytes | None, reason: str, cost: int) -> None:
    """It counts for no curve, but what it cost, or can have cost, for the budget."""
    found = found_of(asked(answer), catalog())

    assert (found.status, found.reason, found.suffices, found.asked_nanousd) == ("dropped", reason, None, cost)


def test_what_a_judge_reads_is_bounded() -> None:
    """Of long answers the beginning, of a long conversation the end."""
    long = ChatRequest(model="auto", messages=(Message(role="user", content="x" * 100_000 + "end"),))
    text = judge_request("judge", long, "s" * 100_000, "l" * 100_000, small_first=True).messages[1].text()

    assert len(text) < 3 * LONGEST_SHOWN + 200
    assert "end\n[end of request]" in text
    assert are_same("", " ") and not are_same("!", "?")
    assert verdict_of("SAME", small_first=True)
