# What a batch of three hundred costs the people beside it, in steps of the engine and on no clock: the same on every
# machine. The large version, through the whole stack on the demo model, is in tests/soak/test_batch_beside_people.py.

from __future__ import annotations

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.step.messages import Event, NewTokens
from tests.support.engine import counting_loop, greedy

PROMPT, REPLY = 24, 12  # tokens
PEOPLE = 40
EVERY = 7  # steps between two people


def first_token_steps(loop: EngineLoop, lines: int) -> list[int]:
    """Run a batch of ``lines`` while people come; return how many steps each of them waited for a first token."""
    for number in range(lines):
        loop.handle(greedy(f"b{number}", prompt(number), REPLY, tenant="batch", tier="batch"))
    found: dict[str, int] = {}
    step = 0
    while len(found) < PEOPLE or loop.has_work():
        if step % EVERY == 0 and step < EVERY * PEOPLE:
            loop.handle(greedy(f"p{step}", prompt(1000 + step), REPLY, tenant="people"))
        for event in loop.step():
            found |= _told(event)
        loop.scheduler.check()
        step += 1
    return list(found.values())


def prompt(number: int) -> list[int]:
    """Return a prompt that no other request has."""
    return [number % 250, number // 250, *range(PROMPT - 2)]


def _told(event: Event) -> dict[str, int]:
    if isinstance(event, NewTokens) and event.timings is not None and event.request_id.startswith("p"):
        return {event.request_id: event.timings.first_token_steps}
    return {}


def test_people_beside_a_batch_have_their_first_token_as_soon_as_without() -> None:
    """The engine is full of the batch all the time, and a person's prompt still goes into the very next step."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "block_size": 8}
    alone, _ = counting_loop(512, max_model_len=64, **settings)
    full, runner = counting_loop(512, max_model_len=64, **settings)

    without, with_batch = first_token_steps(alone, 0), first_token_steps(full, 300)

    assert len(without) == len(with_batch) == PEOPLE
    assert set(without) == {1}
    assert set(with_batch) == {1}
    assert max(len(plan.sequences) for plan in runner.plans) == 16
