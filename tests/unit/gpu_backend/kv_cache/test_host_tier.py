# Host memory behind the KV cache: what the device gives away comes back unchanged, and the books hold on both sides.

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.kv_cache.block_log import BlockLog, number_of
from gpu_backend.kv_cache.block_tables import extend_hashes
from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.server.client.kv_publisher import as_told
from gpu_backend.step.plan import StepPlan, StepResult
from tests.support.engine import answer_all, continuation, counting_loop, greedy, model_loop
from tests.support.kv_index import KvIndex
from tests.support.tiny_model import TinyModel, write_tiny_model

BLOCK = 4
MOVES = (*("table", "publish", "release") * 4, "block", "out", "in", "drop")


def hashes_of(tokens: list[int], salt: bytes) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, BLOCK, salt)
    return hashes


class Memory:
    """What lies in the blocks of both sides, moved as the block manager says."""

    def __init__(self) -> None:
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}

    def follow(self, blocks: BlockManager) -> None:
        for copy in blocks.take_copies():
            if copy.to_host:
                self.host[copy.target] = self.device.get(copy.source)
            else:
                self.device[copy.target] = self.host[copy.source]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 12), st.integers(0, 10), st.integers(0, 12))
def test_what_is_found_is_what_was_stored(seed: int, num_blocks: int, num_host_blocks: int, protected: int) -> None:
    """Wherever a block wandered, what is found is what its hash says, and is booked for the tenant that cached it;
    swapped tables come back as they went. Who follows the log finds what can be found, in the same memory."""
    log, index = BlockLog(BLOCK), KvIndex()
    blocks = BlockManager(num_blocks, BLOCK, min(protected, num_blocks), num_host_blocks=num_host_blocks, log=log)
    memory = Memory()
    held: list[tuple[list[int], list[bytes], str]] = []
    swapped: list[tuple[tuple[int, ...], list[Any], str]] = []
    seen: dict[bytes, str] = {}  # whose keys
    dice = Random(seed)  # lists that are drawn move by move have six of them on average: nothing comes back in so few
    for _ in range(100):
        move, choice = dice.choice(MOVES), dice.randrange(2**16)
        tenant = "ab"[choice % 2]
        blocks.note_request(tenant, 1.0)
        table, hashes, owner = held[choice % len(held)] if held else ([], [], "a")
        if move == "table":
            wanted = hashes_of([choice % 3] * (choice % 5) * BLOCK, tenant.encode())
            allocation = blocks.allocate_table(wanted, len(wanted) + choice % 2, choice % 3, tenant)
            memory.follow(blocks)
            seen |= dict.fromkeys(wanted, tenant)
            if allocation is not None:
                found = allocation.block_table[: allocation.num_cached]
                assert [memory.device[block] for block in found] == wanted[: allocation.num_cached]
                fresh = allocation.block_table[allocation.num_cached :]
                memory.device |= dict.fromkeys(fresh)
                memory.device |= dict(zip(fresh, wanted[allocation.num_cached :], strict=False))
                held.append((list(allocation.block_table), wanted, tenant))
        elif move == "block" and held:
            block = blocks.allocate_block(owner)
            memory.follow(blocks)
            if block is not None:
                memory.device[block] = None
                table.append(block)
        elif move == "publish":
            for place, (block, key) in enumerate(zip(table, hashes, strict=False)):
                log.describe(key, hashes[place - 1] if place else None, [len(hashes)] * BLOCK, None)
                blocks.publish(block, key, owner)
        elif move == "release" and held:
            held.pop(choice % len(held))
            blocks.release(table)
        elif move == "out" and held:
            places = blocks.swap_out(table, owner)
            if places is not None:
                swapped.append((places, [memory.device[block] for block in table], owner))
                held.pop(choice % len(held))
            memory.follow(blocks)
        elif move == "in" and swapped:
            places, contents, owner = swapped[-1]
            back = blocks.swap_in(places, tenant=owner, fresh=choice % 3)
            memory.follow(blocks)
            if back is not None:
                swapped.pop()
                assert len(back) == len(contents) + choice % 3
                assert [memory.device[block] for block in back[: len(contents)]] == contents
                memory.device |= dict.fromkeys(back[len(contents) :])
                held.append((list(back), [], owner))
        elif move == "drop" and swapped:
            blocks.host.free(swapped.pop()[0])

        blocks.check([table for table, _, _ in held], [places for places, _, _ in swapped])
        for pool in (blocks.device, blocks.host):
            assert all(named.tenant == seen[key] for key, named in pool.by_key.items())
        if choice % 3:  # else the events of several moves come together
            for event in log.take():
                index.apply(as_told(event))
            there = {number_of(key): found for key in seen if any(found := where(blocks, key))}
            assert {n: (n in index.blocks["GPU"], n in index.blocks["CPU"]) for n in there} == there
            assert set(index.blocks["GPU"]) | set(index.blocks["CPU"]) == set(there)


def where(blocks: BlockManager, key: bytes) -> tuple[bool, bool]:
    """Return whether a key can be found on the device, and on the host."""
    on_host = key in blocks.host
    return bool(blocks.count_known([key], 0)) and not on_host, on_host


def cache(blocks: BlockManager, tenant: str, *keys: bytes) -> int:
    """Find or compute a prompt for a tenant, and let it go; return how many of its blocks were found."""
    allocation = blocks.allocate_table(keys, len(keys), tenant=tenant)
    assert allocation is not None
    for block, key in zip(allocation.block_table, keys, strict=True):
        blocks.publish(block, key, tenant)
    blocks.release(allocation.block_table)
    return allocation.num_cached


def test_flood_of_one_tenant_leaves_anothers_part_of_host_memory() -> None:
    """What a flood drove from the device stays on the host, within the part of the tenant that cached it."""
    blocks = BlockManager(8, BLOCK, 8, num_host_blocks=8)
    for tenant in ("quiet", "loud"):
        blocks.note_request(tenant, 1.0)
    prompt = [b"quiet %d" % number for number in range(8)]
    cache(blocks, "quiet", *prompt)

    for number in range(40):
        cache(blocks, "loud", b"loud %d" % number)

    assert [where(blocks, key) for key in prompt] == [(True, False)] * 3 + [(False, True)] * 3 + [(False, False)] * 2


def test_what_another_drove_from_the_device_takes_the_room_of_its_owner_on_the_host() -> None:
    """Not of who drove it away: that has its own part there, which goes to nobody else's blocks."""
    blocks = BlockManager(2, BLOCK, 2, num_host_blocks=4)
    for tenant in ("quiet", "loud"):
        blocks.note_request(tenant, 1.0)
    for tenant, keys in (("loud", [b"1"]), ("loud", [b"2", b"3"]), ("quiet", [b"x", b"y"])):
        cache(blocks, tenant, *keys)
    blocks.host.take(3, "loud")  # all but one are a sequence's now
    assert where(blocks, b"2") == (False, True)

    cache(blocks, "loud", b"4", b"5")

    assert [where(blocks, key) for key in (b"2", b"x", b"y")] == [(False, True), (False, False), (False, False)]


@pytest.mark.parametrize("is_back", [True, False])
def test_a_block_that_came_back_from_the_host_outlasts_a_scan(is_back: bool) -> None:
    """It is given away after newer ones that were seen once: by the device, and then by the host, too."""
    blocks = BlockManager(3, BLOCK, num_host_blocks=3)
    blocks.note_request("a", 1.0)
    cache(blocks, "a", b"x")
    if is_back:
        cache(blocks, "a", b"1", b"2", b"3")
        assert where(blocks, b"x") == (False, True)
        assert cache(blocks, "a", b"x") == 1
        blocks.host.drop(list(blocks.host.by_key.values()))
        blocks.device.drop([named for key, named in blocks.device.by_key.items() if key != b"x"])

    for key in (b"y", b"z", b"u"):
        cache(blocks, "a", key)
    assert where(blocks, b"x") == (is_back, not is_back)

    for keys in ((b"4", b"5", b"6"), (b"7",), (b"8",)):
        cache(blocks, "a", *keys)
    assert where(blocks, b"x") == (False, is_back)


def test_prompt_comes_back_from_host_memory() -> None:
    """A prompt that the device had no room for is found again, block for block, without being computed; by no other
    tenant."""
    loop, runner = counting_loop(
        16, max_model_len=60, num_host_blocks=64, max_num_batched_tokens=64, max_num_seqs=1, block_size=4
    )
    answer_all(loop, [greedy("first", range(42), 3)])
    answer_all(loop, [greedy(f"f{i}", range(50 + 40 * i, 90 + 40 * i), 8) for i in range(4)])
    other = answer_all(loop, [greedy("other", range(42), 3, tenant="other")])["other", 0]
    assert other.events[0].cached_tokens == 0
    runner.plans.clear()

    again = answer_all(loop, [greedy("again", range(42), 3)])["again", 0]

    assert again.events[0].cached_tokens == 40
    assert again.token_ids == continuation(range(42), 3)
    assert runner.plans[0].num_tokens == 2
    assert sum(not copy.to_host for copy in runner.plans[0].copies) >= 8


def test_copies_of_a_failed_step_are_not_trusted() -> None:
    """If a step raises, none finds what its copies were to bring, on either side; the next step is right again."""
    loop, runner = counting_loop(
        16, max_model_len=60, num_host_blocks=64, max_num_batched_tokens=64, max_num_seqs=1, block_size=4
    )
    answer_all(loop, [greedy("first", range(42), 3)])
    answer_all(loop, [greedy("second", range(100, 150), 3)])

    def fail(plan: StepPlan) -> StepResult:
        assert plan.copies
        raise RuntimeError("the copy broke off")

    loop.runner.run = fail  # type: ignore[method-assign]
    loop.handle(greedy("third", range(42), 3))
    loop.step()
    loop.scheduler.check()
    loop.runner.run = runner.__class__.run.__get__(runner)  # type: ignore[method-assign]

    answers = answer_all(loop, [greedy("x", range(42), 3), greedy("y", range(100, 150), 3)])

    assert answers["x", 0].token_ids == continuation(range(42), 3)
    assert answers["y", 0].token_ids == continuation(range(100, 150), 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), TinyModel())


def test_model_says_the_same_from_host_memory(llama: Path) -> None:
    """Keys and values that went to host memory and back make the same tokens, and spare their computation."""
    prompts = [tuple((7 * i + j * j) % 250 for j in range(100)) for i in range(6)]
    commands = [greedy(str(i), prompt, 6) for i, prompt in enumerate(prompts)]
    expected = answer_all(model_loop(llama, max_num_seqs=2), commands)
    loop = model_loop(llama, max_num_seqs=2, num_kv_blocks=14, max_model_len=200, host_kv_bytes=4 * 2**20)

    answer_all(loop, commands)
    again = answer_all(loop, commands)

    assert {key: answer.token_ids for key, answer in again.items()} == {k: a.token_ids for k, a in expected.items()}
    assert all(answer.events[0].cached_tokens == 96 for answer in again.values())
