# Which goes next for what of its prompt is cached: within a bound on service, past none more than a few times, and by
# one's own cached blocks alone.

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.scheduling.fairness import MOST_PASSED, REPLY_TOKEN
from tests.support.engine import Answer, answer_all, collect, counting_loop, greedy

SYSTEM = 32  # tokens of a tenant's common beginning


def narrow_loop(lead: int | None, num_blocks: int = 400) -> EngineLoop:
    """Build a loop that serves one after the other."""
    loop, _ = counting_loop(num_blocks, 64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64, cached_lead=lead)
    return loop


def prompt(tenant: int, number: int) -> tuple[int, ...]:
    """Return a prompt with its tenant's common beginning."""
    return (*[tenant] * SYSTEM, number % 250, number // 250)


def order(loop: EngineLoop) -> list[str]:
    """Step until nothing is left; return the requests in the order of their first tokens."""
    answers: dict[tuple[str, int], Answer] = {}
    while loop.has_work():
        collect(answers, loop.step())
        loop.scheduler.check()
    return [request_id for request_id, _ in answers]


def computed(loop: EngineLoop, tenants: int, each: int) -> float:
    """Let tenants ask in turns with room for one beginning in the cache; return the tokens that were computed."""
    for number in range(each):
        for tenant in range(tenants):
            loop.handle(greedy(f"{tenant}.{number}", prompt(tenant, number), 2, tenant=f"t{tenant}"))
    order(loop)
    return loop.load().counters["computed_tokens"]


def test_cached_beginnings_are_used_while_they_are_there() -> None:
    """Where the cache has room for few beginnings, requests of one tenant follow each other, and less is computed."""
    by_turns, by_cache = (computed(narrow_loop(lead, num_blocks=16), 4, 8) for lead in (0, 100))

    assert by_cache < 0.6 * by_turns


def test_without_a_lead_the_counters_alone_decide() -> None:
    """No lead is no preference, within a tenant's own line either."""
    loop = narrow_loop(0)
    answer_all(loop, [greedy("first", prompt(1, 0), 1, tenant="a")])
    for name, tokens in (("new", range(100, 134)), ("cached", prompt(1, 1))):
        loop.handle(greedy(name, tokens, 1, tenant="a"))

    assert order(loop) == ["new", "cached"]


def test_lead_ends_where_service_is_too_far_apart() -> None:
    """A tenant with cached prompts goes on until it is the lead ahead, whatever waits; then it is the other's turn."""
    first = SYSTEM + 2 + REPLY_TOKEN  # service of a prompt that is not cached, with its one token
    cached = 2 + REPLY_TOKEN
    loop = narrow_loop(int(first + 6 * cached))
    answer_all(loop, [greedy("first", prompt(1, 0), 1, tenant="cached")])
    loop.handle(greedy("other", range(100, 134), 1, tenant="other"))
    for number in range(1, 40):
        loop.handle(greedy(str(number), prompt(1, number), 1, tenant="cached"))

    places = order(loop)

    assert places.index("other") == 7 < MOST_PASSED


def passers(loop: EngineLoop, late: Iterable[str], tenant: str) -> int:
    """Let one request wait while cached ones of a tenant come without end; return how many go before it."""
    answer_all(loop, [greedy("first", prompt(1, 0), 1, tenant="cached")])
    loop.handle(greedy("other", range(100, 134), 1, tenant=tenant))
    answers: dict[tuple[str, int], Answer] = {}
    for number, name in enumerate(late, 1):
        loop.handle(greedy(name, prompt(1, number), 1, tenant="cached"))
        if number > 3:
            collect(answers, loop.step())
            loop.scheduler.check()
        if ("other", 0) in answers:
            return len(answers) - 1
    raise AssertionError("it starved")


def test_no_request_is_passed_for_ever() -> None:
    """With any lead, what is not cached waits for a few, of its own tenant or of others, and no more."""
    late = [str(number) for number in range(200)]

    assert passers(narrow_loop(10**9), late, "other") == MOST_PASSED
    assert passers(narrow_loop(10**9), late, "cached") == MOST_PASSED


def test_what_others_have_cached_moves_no_tenant() -> None:
    """The same prompt in another's cache, however often, does not change who goes when."""

    def places(neighbours: int) -> list[str]:
        loop = narrow_loop(10**9)
        for number in range(neighbours):
            answer_all(loop, [greedy("other", prompt(1, 0), 1, tenant=f"other {number}")])
        for name, tokens in (("a", range(100, 134)), ("b", prompt(1, 1)), ("c", prompt(1, 2)), ("d", range(30))):
            for tenant in ("me", "you"):
                loop.handle(greedy(name + tenant, tokens, 1, tenant=tenant))
        return order(loop)

    assert places(0) == places(1) == places(3)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 3)), min_size=1, max_size=60),
    lead=st.sampled_from([None, 0, 20, 10**6]),
    num_blocks=st.integers(16, 60),
    every=st.integers(1, 4),
)
def test_later_ones_of_a_line_pass_few_times(
    requests: list[tuple[int, bool, int]], lead: int | None, num_blocks: int, every: int
) -> None:
    """Whatever is asked and cached, no request is passed by more of its own tenant's later ones; none with no lead."""
    loop = narrow_loop(lead, num_blocks)
    answers: dict[tuple[str, int], Answer] = {}
    for number, (tenant, is_common, reply) in enumerate(requests):
        tokens = prompt(tenant, number) if is_common else [(number * 31 + i) % 250 for i in range(34)]
        loop.handle(greedy(str(number), tokens, reply, tenant=str(tenant)))
        if number % every == 0:
            collect(answers, loop.step())
            loop.scheduler.check()
    while loop.has_work():
        collect(answers, loop.step())
        loop.scheduler.check()
    went = [int(request_id) for request_id, _ in answers]

    assert sorted(went) == list(range(len(requests)))
    for place, number in enumerate(went):
        earlier = [other for other in went[:place] if requests[other][0] == requests[number][0]]
        assert sum(other > number for other in earlier) <= (0 if lead == 0 else MOST_PASSED)


def test_a_high_priority_goes_before_a_normal_one_of_its_tenant() -> None:
    """And a normal one before a low one; of equal ones the first, and another tenant's turn stays where it was."""
    loop = narrow_loop(0)
    asked = {"now": "normal", "low": "low", "normal": "normal", "high": "high", "second": "high", "last": "low"}
    loop.handle(greedy("other", range(50, 60), 1, tenant="b"))
    for name, priority in asked.items():
        loop.handle(greedy(name, range(10), 1, tenant="a", priority=priority))
    served = order(loop)

    assert [name for name in served if name != "other"] == ["high", "second", "now", "normal", "low", "last"]
    assert served.index("other") <= 1


def test_no_request_is_passed_for_ever_by_higher_priorities() -> None:
    """A low one is passed sixteen times, however many come."""
    loop = narrow_loop(0)
    loop.handle(greedy("low", range(10), 1, tenant="a", priority="low"))
    for number in range(40):
        loop.handle(greedy(f"high {number}", range(10), 1, tenant="a", priority="high"))

    assert order(loop).index("low") == MOST_PASSED
