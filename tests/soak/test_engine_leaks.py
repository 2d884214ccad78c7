# Ten thousand requests of every kind through one engine, a third of them given up at some random moment: nothing is
# left of them, in the device's blocks, in the host's, or in the process.

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.step.cost import StepCost
from gpu_backend.step.grammar import Constraint, is_available
from gpu_backend.step.messages import Abort, Command, Embed, Embedding, Generate, NewTokens
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
from gpu_backend.step.sequence import Sequence
from tests.support.engine import expect_short_replies, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

REQUESTS = 10_000
WARM_UP = 3_000  # by then what is kept on purpose is there: caches, forecasts, accounts
CROWD = 40
MOST_GROWTH = 16 * 2**20  # bytes of the process, over the other 7,000
MOST_NEW_OBJECTS = 2_000
COMMON = tuple(range(100, 140))
GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]{3,20}") if is_available() else None

pytestmark = pytest.mark.soak


def test_ten_thousand_requests_leave_nothing(tmp_path: Path) -> None:
    """Books are checked all the way; in the end everything is free, and the process has not grown."""
    loop = model_loop(
        write_tiny_model(tmp_path, TinyModel(), with_tokenizer=True),
        copy_seconds=6e-5,  # by the cost below some who give way are copied, and some computed again
        step_cost=StepCost(fixed=1e-3, weights=0.0, token=1e-5, context=0.0, pair=0.0),
        step_stretch=100.0,
        num_kv_blocks=60,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=200,
        host_kv_bytes=4 * 2**20,
        speculative_method="ngram",
    )
    expect_short_replies(loop)
    dice = random.Random(1)
    before, objects = 0, 0
    open_requests: set[str] = set()
    ends: Counter[str] = Counter()
    for number in range(REQUESTS):
        if number == WARM_UP:
            settle(loop, open_requests, ends)
            before, objects = resident_bytes(), live_objects()
        open_requests.add(str(number))
        hear(loop.handle(some_request(dice, str(number))), open_requests, ends)
        if dice.random() < 0.35:
            hear(loop.handle(Abort(dice.choice(sorted(open_requests)))), open_requests, ends)
        while len(open_requests) > CROWD or dice.random() < 0.3:
            hear(loop.step(), open_requests, ends)
        if number % 100 == 0:
            loop.scheduler.check()
    settle(loop, open_requests, ends)

    assert ends["abort"] > REQUESTS // 10 and ends["length"] > REQUESTS // 10 and not ends["error"]
    assert loop.scheduler.running.num_preempted > loop.scheduler.running.num_swapped > 0
    assert live_objects() - objects < MOST_NEW_OBJECTS
    kinds = Counter(map(type, gc.get_objects()))
    assert kinds[Sequence] == 0
    assert kinds[Constraint] <= 1  # the compiled grammar, kept for whoever sends it again
    assert resident_bytes() - before < MOST_GROWTH


def some_request(dice: random.Random, request_id: str) -> Command:
    """Ask for anything: long and short, with a common beginning or none, replies or an embedding."""
    prompt = (*COMMON[: dice.choice((0, 20, 40))], *(dice.randrange(250) for _ in range(dice.randrange(1, 60))))
    tenant = f"team {dice.randrange(30)}"
    if dice.random() < 0.1:
        return Embed(request_id, prompt, tenant=tenant)
    sampling = SamplingParams(
        max_tokens=dice.randrange(1, 40),
        temperature=dice.choice((0.0, 1.0)),
        seed=dice.randrange(2**40),
        logprobs=dice.choice((None, None, 2)),
        prompt_logprobs=dice.choice((None, None, None, 1)),
        frequency_penalty=dice.choice((0.0, 0.5)),
        stop_token_ids=frozenset(range(dice.choice((0, 20)))),
        grammar=GRAMMAR if dice.random() < 0.1 else None,
    )
    tier = dice.choice(("interactive", "batch"))
    return Generate(request_id, prompt, sampling, n=dice.choice((1, 1, 1, 3)), tenant=tenant, tier=tier)


def hear(events: list[NewTokens | Embedding], open_requests: set[str], ends: Counter[str]) -> None:
    """Take note of replies that have ended."""
    for event in events:
        if isinstance(event, Embedding) or event.finish_reason is not None:
            ends["embedding" if isinstance(event, Embedding) else str(event.finish_reason)] += 1
            open_requests.discard(event.request_id)


def settle(loop: EngineLoop, open_requests: set[str], ends: Counter[str]) -> None:
    """Answer all that is open; every block must come back."""
    while loop.has_work():
        hear(loop.step(), open_requests, ends)
    loop.scheduler.check()
    assert loop.blocks.num_in_use == len(loop.scheduler.running) == loop.scheduler.num_waiting == 0
    loop.blocks.host.check(())


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_objects() -> int:
    """Return how many objects are alive."""
    gc.collect()
    return len(gc.get_objects())
