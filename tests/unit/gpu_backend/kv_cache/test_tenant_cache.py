# Tenants and the prefix cache: whose blocks go, what no other can take, and that no tenant learns of another's prompts.

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.kv_cache.tenant_cache import IDLE_SECONDS, TenantCache
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.clock import SetClock
from tests.support.engine import answer_all, counting_loop, expect_short_replies, greedy


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


def fill(cache: TenantCache, name: str, start: int, count: int) -> None:
    cache.add(name, [(key(number), False) for number in range(start, start + count)])


def owners(cache: TenantCache) -> Counter[int]:
    """Count the blocks by the thousand that their number lies in."""
    return Counter(int.from_bytes(left, "little") // 1000 for left in cache)


def test_the_tenant_with_most_for_its_weight_loses_first() -> None:
    """Evictions even out the tenants' parts, in proportion to their weights."""
    cache = TenantCache()
    for number, weight in enumerate((1.0, 1.0, 2.0)):
        cache.touch(str(number), weight)
        fill(cache, str(number), 1000 * number, 400)

    cache.evict_for("0", 400)

    left = owners(cache)
    assert left[0] == pytest.approx(200, abs=15)
    assert left[1] == pytest.approx(200, abs=15)
    assert left[2] == pytest.approx(400, abs=15)


def test_protected_part_is_given_to_no_other() -> None:
    """Down to its part of the protected blocks a tenant can be robbed, no further; its own work may take the rest."""
    cache = TenantCache(num_protected=100)
    cache.touch("small", 1.0)
    cache.touch("large", 3.0)
    fill(cache, "small", 0, 40)
    fill(cache, "large", 1000, 200)

    assert cache.available_to("large") == 240 - 24
    assert cache.available_to("new") == 240 - 24 - 74
    cache.evict_for("new", 240 - 24 - 74)
    assert owners(cache) == {0: 24, 1: 74}
    cache.evict_for("small", 24)
    assert owners(cache) == {1: 74}


def test_idle_tenant_has_no_part() -> None:
    """Ten minutes after its last request a tenant's blocks are the first to go, all of them."""
    clock = SetClock()
    cache = TenantCache(100, clock.monotonic)
    cache.touch("idle", 1.0)
    fill(cache, "idle", 0, 40)
    clock.move(IDLE_SECONDS - 1)
    cache.touch("busy", 1.0)
    fill(cache, "busy", 1000, 60)
    assert cache.available_to("busy") == 100 - 40

    clock.move(2)
    cache.touch("busy", 1.0)

    assert cache.available_to("busy") == 100
    cache.evict_for("busy", 40)
    assert owners(cache) == {1: 60}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_books_hold_after_every_move(seed: int, num_protected: int) -> None:
    """Whatever comes, counts are right, what is available can be had, and no active tenant falls below its part."""
    clock = SetClock()
    cache = TenantCache(num_protected, clock.monotonic)
    held: dict[str, list[bytes]] = {name: [] for name in "abcd"}
    owner: dict[bytes, str] = {}
    numbers = iter(range(10_000))
    dice = Random(seed)  # lists that are drawn move by move have six of them on average: nothing is evicted in so few
    for _ in range(60):
        move = dice.choice(("touch", "add", "remove", "evict", "wait"))
        name, amount = dice.choice("abcd"), dice.randint(1, 30)
        if move == "touch":
            cache.touch(name, amount / 10)
        elif move == "wait":
            clock.move(amount * 40.0)
        elif move == "add":
            fresh = [key(next(numbers)) for _ in range(amount)]
            cache.add(name, [(new, amount % 2 == 0) for new in fresh])
            held[name] += fresh
            owner |= dict.fromkeys(fresh, name)
        elif move == "remove" and held[name]:
            cache.remove(name, [held[name].pop(amount % len(held[name]))])
        elif move == "evict":
            floors = {tenant.name: tenant.floor for tenant in cache._active.values()}
            before = {other: len(keys) for other, keys in held.items()}
            gone = cache.evict_for(name, min(amount, cache.available_to(name)))
            for evicted in gone:
                held[owner[evicted]].remove(evicted)
            for other, keys in held.items():
                assert other == name or len(keys) >= min(before[other], floors.get(other, 0))

        cache.check()
        assert sorted(cache) == sorted(left for keys in held.values() for left in keys)


def test_flood_of_one_tenant_leaves_anothers_prompt_cached() -> None:
    """However much a tenant sends, another's cached prompt within its part is found again; its decodes need no less."""
    loop, _ = counting_loop(64, max_model_len=128, max_num_batched_tokens=64, max_num_seqs=16, block_size=4)
    prompt = range(26)
    answer_all(loop, [greedy("first", prompt, 1, tenant="quiet")])

    expect_short_replies(loop)
    flood = [greedy(f"f{i}", range(7 * i, 7 * i + 60), 60, tenant="loud") for i in range(30)]
    answer_all(loop, [*flood, greedy("between", prompt, 1, tenant="loud")])
    again = answer_all(loop, [greedy("again", prompt, 1, tenant="quiet")])["again", 0]

    assert loop.scheduler.running.num_preempted > 0
    assert again.events[0].cached_tokens == 24


def test_longest_sequence_runs_whatever_is_protected() -> None:
    """A tenant's protected blocks never keep another's only sequence from going on."""
    loop, _ = counting_loop(
        16, max_model_len=56, max_num_batched_tokens=64, max_num_seqs=4, block_size=4, protected_cache_share=1.0
    )
    answer_all(loop, [greedy("first", range(40), 1, tenant="quiet")])

    answers = answer_all(loop, [greedy("long", range(100, 120), 36, tenant="loud")])

    assert len(answers["long", 0].token_ids) == 36


def run_beside(neighbours: int) -> tuple[list[int], list[int]]:
    """Return each step's tokens and each reply's cached tokens of a tenant whose prompts others sent before."""
    turns = [tuple(range(start, start + length)) for start, length in ((0, 45), (90, 45), (0, 70))]
    loop, runner = counting_loop(400, max_num_batched_tokens=32, max_num_seqs=4, block_size=4)
    for number in range(neighbours):
        for prompt in turns:
            answer_all(loop, [greedy("other", prompt, 3, tenant=f"other {number}")])
    runner.plans.clear()
    cached = []
    for prompt in turns:
        answers = answer_all(
            loop, [greedy("mine", prompt, 3, tenant="me"), greedy("short", prompt[:9], 3, tenant="me")]
        )
        cached += [answers[name, 0].events[0].cached_tokens for name in ("mine", "short")]
    return [plan.num_tokens for plan in runner.plans], cached


@pytest.mark.parametrize("neighbours", [1, 5])
def test_tenant_cannot_tell_what_others_have_cached(neighbours: int) -> None:
    """Prefilled tokens, steps and cached tokens of a tenant are the same with and without others' equal prompts."""
    steps, cached = run_beside(0)

    assert run_beside(neighbours) == (steps, cached)
    assert cached == [0, 8, 0, 8, 44, 8]
    assert sum(steps) == 45 + 1 + 45 + 1 + 26 + 1 + 6 * 2


def test_declared_beginning_is_shared_by_all_and_nothing_after_it() -> None:
    """A declared system prompt is computed once for everybody, in whole blocks; what follows stays a tenant's own."""
    system = tuple(range(18))
    loop, runner = counting_loop(
        64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4, shared_prefixes=(system, (7, 7, 7, 7, 7))
    )
    prompt = (*system, *range(50, 62))

    found = {}
    for name, tenant in (("one", "blue"), ("two", "red"), ("three", "red"), ("other", "blue")):
        tokens = prompt if name != "other" else prompt[:7]
        answers = answer_all(loop, [Generate(name, tokens, SamplingParams(1, temperature=0.0), tenant=tenant)])
        found[name] = answers[name, 0].events[0].cached_tokens

    assert found == {"one": 0, "two": 16, "three": 28, "other": 4}
    assert [plan.num_tokens for plan in runner.plans] == [30, 14, 2, 3]


def test_nothing_is_shared_without_the_prefix_cache() -> None:
    """Turning the cache off turns declared beginnings off, too."""
    system = tuple(range(16))
    loop, _ = counting_loop(
        64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4, shared_prefixes=(system,), prefix_caching=False
    )
    answer_all(loop, [greedy("one", (*system, 1), 1)])

    answer = answer_all(loop, [greedy("two", (*system, 1), 1)])["two", 0]

    assert answer.events[0].cached_tokens == 0
