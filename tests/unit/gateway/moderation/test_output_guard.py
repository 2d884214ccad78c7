# Answers that an outside checker judges: nothing of them is out before its verdict, and what it says is understood.

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from gateway.calls.hooks import NO_HOOK
from gateway.core.errors import ContentPolicyViolation
from gateway.core.settings import CheckerSettings, Safety
from gateway.moderation.checker import OVERLAP, PIECE
from gateway.moderation.output_guard import STEP, output_guard_of
from protocol.chat import ChatReply, Choice, FinishReason, ReplyMessage, Spoken
from protocol.events import Delta
from router.catalog.targets import Endpoint, Target
from tests.support.guarding import BLOCKS, Guarding
from tests.support.house import model
from tests.support.scripted_checker import ScriptedChecker, scripted_checker

TARGET = Target(model("small"), Endpoint("here", "http://upstream"))
ANSWER = "Lima is the capital of Peru."
SAID = [Delta(0, "Lima is "), Delta(0, "the capital of Peru."), Delta(0, finish_reason=FinishReason.STOP)]
WHOLE = Choice(index=0, message=ReplyMessage(content=ANSWER), finish_reason=FinishReason.STOP)


@pytest.fixture(scope="module")
def checker() -> Iterator[ScriptedChecker]:
    """An outside checker that finds nothing wrong unless it is told to."""
    with scripted_checker() as checker:
        yield checker


def guarded(checker: ScriptedChecker, format: str = "moderations", house: Safety = BLOCKS) -> Guarding:
    """Return a moderator that has answers judged by the checker."""
    checker.calm()
    checker.texts.clear()
    guard = CheckerSettings(url=checker.url, format=format, model="guard", judges="output", deadline=30.0)  # type: ignore[arg-type]
    return Guarding(replace(house, checker=replace(guard, on_failure="block")))


@pytest.mark.parametrize(
    ("format", "asked"),
    [
        ("moderations", [ANSWER]),
        ("llama_guard", ["user: What is the capital of Peru?", f"assistant: {ANSWER}"]),
    ],
)
async def test_an_answer_is_out_when_it_was_judged(checker: ScriptedChecker, format: str, asked: list[str]) -> None:
    """All of it and in its order; a Llama Guard is shown what was asked beside it."""
    guarding = guarded(checker, format)
    hook = output_guard_of(guarding.moderator, guarding.call(), TARGET)

    held = [hook.delta(delta) for delta in SAID[:2]]
    assert held == [(), ()] and list(await hook.released(is_over=False)) == [] == checker.texts
    hook.delta(SAID[2])
    assert list(await hook.released(is_over=False)) == SAID
    assert checker.texts == asked
    await guarding.close()


async def test_a_long_answer_is_judged_in_parts_that_overlap(checker: ScriptedChecker) -> None:
    """So that its first words need not wait for its last."""
    guarding = guarded(checker)
    hook = output_guard_of(guarding.moderator, guarding.call(), TARGET)
    said = [Delta(0, f"{place:03d} " * (STEP // 8)) for place in range(4)]

    out = []
    for delta in said:
        assert hook.delta(delta) == ()
        out.append(list(await hook.released(is_over=False)))
    assert out == [[], said[:2], [], said[2:]]
    first, second = checker.texts
    assert first == said[0].text + said[1].text and second.endswith(said[2].text + said[3].text)
    assert second.startswith("001 ")
    await guarding.close()


@pytest.mark.parametrize(
    ("format", "names"), [("moderations", "checker:house_rules"), ("llama_guard", "checker:S1, checker:S10")]
)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_what_the_checker_forbids_is_withheld(
    checker: ScriptedChecker, format: str, names: str, is_streamed: bool
) -> None:
    """Streamed or whole, by the names that it has for it."""
    guarding = guarded(checker, format)
    checker.flags = True
    hook = output_guard_of(guarding.moderator, guarding.call(), TARGET)

    with pytest.raises(ContentPolicyViolation, match=names):
        if is_streamed:
            assert [*map(hook.delta, SAID)] == [(), (), ()]
            await hook.released(is_over=False)
        else:
            await hook.whole(ChatReply(choices=(WHOLE,)))
    await guarding.close()


async def test_a_llama_guard_reads_all_of_what_its_context_cannot_hold(checker: ScriptedChecker) -> None:
    """In pieces that overlap, so that nothing long passes because it is long."""
    guarding = guarded(checker, "llama_guard")
    text = "".join(f"{place:05d}" for place in range(5_000))

    assert await guarding.moderator.checker.check([text]) == []
    pieces = [piece.removeprefix("user: ") for piece in checker.texts]
    assert pieces[0] + "".join(piece[OVERLAP:] for piece in pieces[1:]) == text
    assert len(pieces) == 3 and max(map(len, pieces)) <= PIECE + OVERLAP
    await guarding.close()


@pytest.mark.parametrize("verdict", ["Sure, I can help.", "safe-ish"])
async def test_a_verdict_that_is_none_counts_as_a_failure(checker: ScriptedChecker, verdict: str) -> None:
    """The answer may not pass where the house says so, and no key is the worse for it."""
    guarding = guarded(checker, "llama_guard")
    checker.verdict = verdict
    hook = output_guard_of(guarding.moderator, guarding.call(), TARGET)
    [*map(hook.delta, SAID)]

    with pytest.raises(ContentPolicyViolation, match="could not be checked"):
        await hook.released(is_over=True)
    assert not guarding.abuse.paused and not guarding.abuse._seen
    await guarding.close()


async def test_nothing_waits_where_nothing_can_be_blocked(checker: ScriptedChecker) -> None:
    """What is only flagged goes out as it comes, and is judged all the same."""
    guarding = guarded(checker, house=Safety(output="flag"))
    hook = output_guard_of(guarding.moderator, guarding.call(), TARGET)

    assert [list(hook.delta(delta)) for delta in SAID] == [[delta] for delta in SAID]
    assert list(await hook.released(is_over=False)) == []
    while guarding.moderator._behind:
        await next(iter(guarding.moderator._behind))
    assert checker.texts == [ANSWER]
    await guarding.close()


async def test_no_answer_is_judged_unless_it_is_asked_for(checker: ScriptedChecker) -> None:
    """A checker of input alone, or an output without a policy, costs an answer nothing."""
    guarding = guarded(checker)
    assert output_guard_of(guarding.moderator, guarding.call(), TARGET) is not NO_HOOK
    guarding.moderator.checker.follow(CheckerSettings(url=checker.url))
    assert output_guard_of(guarding.moderator, guarding.call(), TARGET) is NO_HOOK
    await guarding.close()


async def test_sound_waits_for_the_verdict_on_all_of_its_words(checker: ScriptedChecker) -> None:
    """However long they are: what they are of may have come before."""
    guarding = guarded(checker)
    hook = output_guard_of(guarding.moderator, guarding.call(), TARGET)
    hook.delta(spoken := Delta(0, "x" * STEP, spoken=Spoken(data="AAAA")))

    assert list(await hook.released(is_over=False)) == [] == checker.texts
    hook.delta(SAID[2])
    assert list(await hook.released(is_over=False)) == [spoken, SAID[2]]
    await guarding.close()
