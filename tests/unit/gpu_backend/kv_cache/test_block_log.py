# What routers are told of the prefix cache: what their index of it says, and who can read whose.

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpu_backend.__main__ import read_settings
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.server.client.kv_publisher import as_told
from gpu_backend.step.block_events import BlockStored
from gpu_backend.step.config import KvEventsConfig
from tests.support.engine import answer_all, counting_loop, greedy
from tests.support.kv_index import KvIndex, Tokens

TOLD = KvEventsConfig(enable_kv_cache_events=True)


def follow(loop: EngineLoop, index: KvIndex) -> set[Tokens]:
    for event in loop.take_block_events():
        index.apply(as_told(event))
    return index.prompts()


def beginnings(tokens: range) -> set[Tokens]:
    return {tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4)}


def test_an_index_of_events_knows_the_prompts_that_are_cached() -> None:
    """Blocks come with their tokens, in a row; what is evicted leaves the index; a prompt in a row is one event."""
    loop, _ = counting_loop(16, kv_events=TOLD, block_size=4, max_num_seqs=2, num_host_blocks=8)
    index = KvIndex()
    answer_all(loop, [greedy("first", range(20), 2)])
    (event,) = loop.blocks.log._events if loop.blocks.log else []
    known = follow(loop, index)
    answer_all(loop, [greedy(f"more {i}", range(60 * i, 60 * i + 36), 2) for i in (1, 2, 3)])
    later = follow(loop, index)

    assert as_told(event)["token_ids"] == list(range(20)) and as_told(event)["parent_block_hash"] is None
    assert known >= beginnings(range(20)) and later >= beginnings(range(180, 216))
    assert len(index.blocks["GPU"]) <= 16 and 0 < len(index.blocks["CPU"]) <= 8
    assert loop.take_block_events() == []


def test_equal_prompts_of_two_tenants_are_told_apart() -> None:
    """By their hashes, and by a name that says nothing of the tenant; a declared beginning is of nobody."""
    shared = tuple(range(8))
    loop, _ = counting_loop(32, kv_events=TOLD, block_size=4, shared_prefixes=(shared,))
    index = KvIndex()
    for tenant in ("red team", "blue team"):
        answer_all(loop, [replace(greedy(tenant, range(16), 1), tenant=tenant)])
    follow(loop, index)
    by_tokens = [tokens for _, tokens in index.blocks["GPU"].values()]

    assert [by_tokens.count(tuple(range(start, start + 4))) for start in (0, 4, 8, 12)] == [1, 1, 2, 2]
    assert len(set(index.owners.values())) == 2 == len(index.owners)
    assert not any(word in owner for owner in index.owners.values() for word in ("red", "blue"))


def test_marks_of_beginnings_come_with_the_blocks_that_they_end_in() -> None:
    """At once, or later where the block is there already; each once, and again with a block that moves."""
    loop, _ = counting_loop(16, kv_events=TOLD, block_size=4, max_num_seqs=2, num_host_blocks=16)
    first = replace(greedy("first", range(16), 1), prompt_marks=((70, 9), (71, 16), (72, 3)))
    answer_all(loop, [first])
    begun = told_marks(loop)
    answer_all(loop, [replace(greedy("second", range(20), 1), prompt_marks=((70, 9), (71, 16), (73, 13), (74, 20)))])
    later = told_marks(loop)
    answer_all(loop, [greedy(f"more {i}", range(60 * i, 60 * i + 60), 1) for i in (1, 2)])
    moved = told_marks(loop)

    assert [(mark, place) for mark, _, place in begun] == [(70, "GPU"), (71, "GPU")]
    assert len({block for _, block, _ in begun}) == 2
    assert sorted((mark, place) for mark, _, place in later) == [(73, "GPU"), (74, "GPU")]
    assert {(mark, block) for mark, block, place in moved if place == "CPU"} <= {(m, b) for m, b, _ in begun + later}
    assert {mark for mark, _, place in moved if place == "CPU"}


def test_a_block_where_many_prompts_part_is_not_marked_by_all() -> None:
    """Sixteen are enough: what parts there later is found by the marks before it."""
    loop, _ = counting_loop(64, kv_events=TOLD, block_size=4)
    for number in range(20):
        answer_all(loop, [replace(greedy(f"{number}", (*range(8), 9 + number), 1), prompt_marks=((100 + number, 8),))])

    assert len(told_marks(loop)) == 16


def told_marks(loop: EngineLoop) -> list[tuple[int, int, str]]:
    """Return the marks in the events since the last time, with the blocks and memories that they came with."""
    return [
        (mark, block, event.medium)
        for event in loop.take_block_events()
        if isinstance(event, BlockStored)
        for mark, block in event.prompt_marks
    ]


def test_nothing_is_gathered_unless_it_is_asked_for() -> None:
    """The cache of an engine without the setting has no log."""
    loop, _ = counting_loop(16)

    assert loop.blocks.log is None and loop.take_block_events() == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"enable_kv_cache_event": True}, "enable_kv_cache_event is unknown; known are enable_kv_cache_events"),
        ({"endpoint": "localhost:5557"}, "it is an address such as tcp://127.0.0.1:5557"),
        ({"buffer_steps": "many"}, "Expected `int`, got `str`"),
        ({"publisher": "kafka"}, "it is one of zmq, null"),
    ],
)
def test_a_setting_that_cannot_be_is_told(
    said: dict[str, object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name, and what would be right."""
    with pytest.raises(SystemExit):
        read_settings(["--model", "x", "--kv-events-config", json.dumps(said)], {})

    assert told in capsys.readouterr().err
