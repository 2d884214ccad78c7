# Engines that exchange KV blocks: answers are those of one engine whatever becomes of the blocks, and none is lost.

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.kv_transfer.leases import LEASE
from gpu_backend.kv_transfer.memory import PREFIX, write_all
from gpu_backend.kv_transfer.nixl import NixlAgent, NixlMemory
from gpu_backend.kv_transfer.tcp import MOST_PULLS, TcpTransfer
from gpu_backend.step.messages import Abort, Drain, Drained, Event, FinishReason, Generate
from gpu_backend.step.transfer import RemoteBlocks
from tests.support.engine import Answer, collect, continuation, greedy
from tests.support.kv_transfer import BLOCK, Engine, Wire, counting_engine, decode, prefill, step, until

PROMPT = tuple(range(1, 31))  # seven full blocks and two tokens


WITHOUT_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="SKIPPED: pip install 'tollgate[nixl]'")
NIXL = pytest.param("nixl", marks=WITHOUT_NIXL, id="by NIXL")
EITHER_WAY = pytest.mark.parametrize(
    "engines", [pytest.param("memory", id="in memory"), pytest.param("tcp", id="over TCP"), NIXL], indirect=True
)


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one machine; the test may say by which way blocks come."""
    way = getattr(request, "param", "memory")
    with counting_engine(nixl=way == "nixl") as prefiller, counting_engine(**way_of(way)) as decoder:
        yield prefiller, decoder


def way_of(way: str) -> dict[str, bool]:
    return {"shares_memory": way == "memory", "nixl": way == "nixl"}


def expect_answer(answers: dict[tuple[str, int], Answer], name: str = "a", prompt: tuple[int, ...] = PROMPT) -> None:
    assert answers[name, 0].error is None
    assert answers[name, 0].token_ids == continuation(prompt, len(answers[name, 0].token_ids))
    assert answers[name, 0].finish_reason is FinishReason.LENGTH


def expect_nothing_held(engine: Engine) -> None:
    """Within the time of a lease all blocks are free, whoever is gone, and no shared memory is left."""
    engine.clock.now += LEASE
    if engine.loop.has_work():
        step(engine.loop, {})
    assert engine.loop.blocks.num_in_use == 0
    assert not engine.loop.has_work()
    until(lambda: not any(map(is_shared_memory, Path("/proc/self/fd").iterdir())))


def is_shared_memory(descriptor: Path) -> bool:
    with suppress(FileNotFoundError):
        return PREFIX in str(descriptor.readlink())
    return False


@EITHER_WAY
def test_a_decoder_computes_only_what_does_not_come(engines: tuple[Engine, Engine]) -> None:
    """All full blocks but that of the last token come; both engines have all their blocks back afterwards."""
    prefiller, decoder = engines
    asked = greedy("a", PROMPT)
    remote = prefill(prefiller.loop, asked)
    assert prefiller.loop.blocks.num_in_use == 7

    answers = decode(decoder.loop, [replace(asked, remote=remote)])

    expect_answer(answers)
    assert decoder.runner.plans[0].num_tokens == 2
    assert decoder.counters["kv_blocks_pulled"] == 7
    assert decoder.counters["kv_blocks_shared"] == (0 if is_plain(decoder) else 7)
    until(prefiller.loop.has_work)
    step(prefiller.loop, {})
    assert prefiller.loop.blocks.num_in_use == decoder.loop.blocks.num_in_use == 0


def test_what_is_here_already_is_not_pulled(engines: tuple[Engine, Engine]) -> None:
    """A decoder that has the beginning of a prompt asks for what follows it."""
    prefiller, decoder = engines
    decode(decoder.loop, [greedy("before", PROMPT[:17])])
    remote = prefill(prefiller.loop, greedy("a", PROMPT))

    answers = decode(decoder.loop, [greedy("a", PROMPT, remote=remote)])

    expect_answer(answers)
    assert decoder.counters["kv_blocks_pulled"] == 3


def test_a_prompt_that_is_cached_is_not_asked_for(engines: tuple[Engine, Engine]) -> None:
    """Nothing is to come, so nothing is waited for."""
    prefiller, decoder = engines
    decode(decoder.loop, [greedy("before", PROMPT)])
    remote = prefill(prefiller.loop, greedy("a", PROMPT))

    expect_answer(decode(decoder.loop, [greedy("a", PROMPT, remote=remote)]))

    assert decoder.counters["kv_pulls"] == 0


def test_what_one_engine_computed_and_the_other_pulled_is_not_told_as_cached(engines: tuple[Engine, Engine]) -> None:
    """A prompt's tokens are paid for once: only what the prefiller found in its cache is told as found."""
    prefiller, decoder = engines
    decode(prefiller.loop, [greedy("before", PROMPT[:13])])
    first = prefill(prefiller.loop, greedy("a", PROMPT))

    answers = decode(decoder.loop, [greedy("a", PROMPT, remote=first)])

    assert answers["a", 0].events[-1].cached_tokens == 12


def test_another_tenant_gets_no_block(engines: tuple[Engine, Engine]) -> None:
    """Who asks for another tenant's lease, of the same prompt even, computes it."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT, tenant="one"))

    answers = decode(decoder.loop, [greedy("a", PROMPT, tenant="other", remote=remote)])

    expect_answer(answers)
    assert prefiller.store.num_read == 0
    assert decoder.runner.plans[0].num_tokens == len(PROMPT)


@pytest.mark.parametrize("other", [{"engine_id": "00"}, {"lease": "00"}], ids=str)
def test_a_lease_that_is_over_is_computed(other: dict[str, Any], engines: tuple[Engine, Engine]) -> None:
    """As after a restart of the prefiller, or when a lease ended."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))

    answers = decode(decoder.loop, [greedy("a", PROMPT, remote=replace(remote, **other))])

    expect_answer(answers)
    assert prefiller.store.num_read == 0


@pytest.mark.parametrize("other", [{"fingerprint": "of another model"}, {"secret": "of another fleet, long enough"}])
def test_blocks_of_another_model_or_fleet_are_not_used(other: dict[str, Any]) -> None:
    """The description says what blocks are made of; a key that is not the engines' ends the connection."""
    with counting_engine() as prefiller, counting_engine(**other) as decoder:
        remote = prefill(prefiller.loop, greedy("a", PROMPT))

        answers = decode(decoder.loop, [greedy("a", PROMPT, remote=remote)])

        expect_answer(answers)
        assert prefiller.store.num_read == decoder.store.num_written == 0
        assert decoder.counters["kv_pulls_failed"] == 1
        expect_nothing_held(prefiller)


def test_without_a_secret_no_other_machine_is_asked() -> None:
    """An engine that would not know the other one does not even connect; it serves on no other address either."""
    with counting_engine(secret="") as decoder:
        remote = RemoteBlocks("00", "00", "192.0.2.1", 9)

        expect_answer(decode(decoder.loop, [greedy("a", PROMPT, remote=remote)]))

        with pytest.raises(ValueError, match="without a secret"):
            TcpTransfer(decoder.store, "0.0.0.0", 0)


@EITHER_WAY
@pytest.mark.parametrize("share", [0.0, 0.04, 0.1, 0.3, 0.6, 0.75, 0.9, 0.95])
def test_a_byte_that_changes_on_the_way_changes_no_answer(share: float, engines: tuple[Engine, Engine]) -> None:
    """Wherever it is: in the greeting, a proof, a message or a block."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))
    spoilt = int(share * bytes_of_a_transfer(decoder))

    with Wire(remote, spoilt=spoilt) as wire:
        answers = decode(decoder.loop, [greedy("a", PROMPT, remote=wire.remote)])
        assert wire.passed >= spoilt

    expect_answer(answers)
    assert decoder.counters["kv_pulls_failed"] == 1
    expect_nothing_held(prefiller)


@EITHER_WAY
@pytest.mark.parametrize("share", [0.0, 0.04, 0.1, 0.3, 0.6, 0.75, 0.9, 0.99])
def test_a_wire_that_is_cut_anywhere_changes_no_answer(share: float, engines: tuple[Engine, Engine]) -> None:
    """What came is used, the rest is computed, and the lease ends by itself."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))

    with Wire(remote, int(share * bytes_of_a_transfer(decoder))) as wire:
        answers = decode(decoder.loop, [greedy("a", PROMPT, remote=wire.remote)])

    expect_answer(answers)
    expect_nothing_held(prefiller)


def test_memory_that_is_written_wrongly_changes_no_answer(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums, which come over the connection, tell; what was whole before it is used."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))

    def write_wrongly(descriptor: int, data: memoryview) -> bool:
        spoilt = bytearray(data)
        spoilt[5 * len(data) // 7] ^= 1
        return write_all(descriptor, memoryview(spoilt))

    monkeypatch.setattr("gpu_backend.kv_transfer.tcp.write_all", write_wrongly)
    expect_answer(decode(decoder.loop, [greedy("a", PROMPT, remote=remote)]))

    assert decoder.counters["kv_blocks_shared"] == 5 and decoder.counters["kv_pulls_failed"] == 1
    expect_nothing_held(prefiller)


@WITHOUT_NIXL
@pytest.mark.parametrize("wrong", ["agent", "address", "bytes"])
def test_what_nixl_reads_wrongly_changes_no_answer(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that is not there, of memory that it did not register, or other bytes."""

    def put(memory: NixlMemory, data: memoryview) -> dict[str, Any]:
        there = put_rightly(memory, bytes(len(data)) if wrong == "bytes" else data)
        return there | {"agent": {"agent": "bm8gYWdlbnQ="}, "address": {"address": 4096}, "bytes": {}}[wrong]

    put_rightly = NixlMemory.put
    monkeypatch.setattr(NixlMemory, "put", put)
    with counting_engine(nixl=True) as prefiller, counting_engine(nixl=True) as decoder:
        remote = prefill(prefiller.loop, greedy("a", PROMPT))

        expect_answer(decode(decoder.loop, [greedy("a", PROMPT, remote=remote)]))

        assert decoder.counters["kv_blocks_pulled"] == 0 and decoder.counters["kv_pulls_failed"] == 1
        expect_nothing_held(prefiller)


@WITHOUT_NIXL
@pytest.mark.parametrize("has_it", [True, False])
def test_an_engine_without_nixl_is_spoken_to_over_the_connection(has_it: bool) -> None:
    """Whichever of the two has it."""
    with counting_engine(nixl=has_it) as prefiller, counting_engine(nixl=not has_it, shares_memory=False) as decoder:
        remote = prefill(prefiller.loop, greedy("a", PROMPT))

        expect_answer(decode(decoder.loop, [greedy("a", PROMPT, remote=remote)]))

        assert (decoder.counters["kv_blocks_pulled"], decoder.counters["kv_blocks_shared"]) == (7, 0)


@WITHOUT_NIXL
def test_a_read_that_never_ends_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is kept for as long as something may be written there; after too many, blocks come without NIXL."""
    monkeypatch.setattr("gpu_backend.kv_transfer.nixl.PATIENCE", 0.05)
    monkeypatch.setattr("gpu_backend.kv_transfer.nixl.MOST_LATE", 2)
    ends = [False]
    monkeypatch.setattr(NixlAgent, "state_of", lambda *_: "DONE" if ends[0] else "PROC")
    with counting_engine(nixl=True) as prefiller, counting_engine(nixl=True) as decoder:

        def ask(first: int) -> tuple[float, float]:
            asked = greedy(f"r{first}", (first, *PROMPT))
            expect_answer(
                decode(decoder.loop, [replace(asked, remote=prefill(prefiller.loop, asked))]),
                asked.request_id,
                (first, *PROMPT),
            )
            return decoder.counters["kv_blocks_pulled"], decoder.counters["kv_pulls_failed"]

        counts = [ask(first) for first in (101, 102, 103)]
        ends[0] = True
        counts.append(ask(104))

    assert counts == [(0, 1), (0, 2), (7, 2), (14, 2)]


@WITHOUT_NIXL
def test_engines_that_were_read_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of an engine is another one to NIXL. They are read again all the same, and no read leaves anything."""
    from nixl._api import nixl_agent

    monkeypatch.setattr("gpu_backend.kv_transfer.nixl.MOST_PEERS", 2)
    calls = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        return lambda *given: (calls.update([name]), asked[name](*given))[1]

    asked = {
        each: getattr(nixl_agent, each) for each in ("initialize_xfer", "release_xfer_handle", "remove_remote_agent")
    }
    for name in asked:
        monkeypatch.setattr(nixl_agent, name, counted(name))
    with ExitStack() as stack:
        decoder, *others = [stack.enter_context(counting_engine(nixl=True)) for _ in range(5)]
        assert decoder.transfer._nixl is not None
        for number, prefiller in enumerate([*others, others[0], others[0]]):
            prompt = (number + 101, *PROMPT)
            asks = greedy(f"r{number}", prompt)
            answers = decode(decoder.loop, [replace(asks, remote=prefill(prefiller.loop, asks))])
            expect_answer(answers, asks.request_id, prompt)
        until(lambda: calls["release_xfer_handle"] == 6)

        assert decoder.counters["kv_blocks_pulled"] == 6 * 7
        assert list(decoder.transfer._nixl._peers.values()) == [0, 0]
    assert calls == {"initialize_xfer": 6, "release_xfer_handle": 6, "remove_remote_agent": 3}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_others_go_on_while_a_wire_is_silent(
    share: float, engines: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """And the request that waits is computed when its time is up."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))
    answers: dict[tuple[str, int], Answer] = {}
    most = int(share * bytes_of_a_transfer(decoder))

    with Wire(remote, most, goes_silent=True) as wire:
        collect(answers, decoder.loop.handle(greedy("a", PROMPT, remote=wire.remote)))
        until(lambda: wire.passed == most, lambda: step(decoder.loop, answers))
        collect(answers, decoder.loop.handle(greedy("beside", (9, 9, 9))))
        until(
            lambda: ("beside", 0) in answers and not decoder.loop.scheduler.replies, lambda: step(decoder.loop, answers)
        )
        expect_answer(answers, "beside", (9, 9, 9))
        assert ("a", 0) not in answers
        decoder.clock.now += 5
        decode(decoder.loop, [], answers)

    expect_answer(answers)
    assert caplog.messages == ["KV blocks of another engine did not come, so they are computed: given up"]
    expect_nothing_held(prefiller)


def is_plain(engine: Engine) -> bool:
    """Whether its blocks come over the connection."""
    return not engine.transfer._shares_memory and engine.transfer._nixl is None


def bytes_of_a_transfer(like: Engine) -> int:
    """Count what a prefiller sends over the connection, all in all."""
    by_nixl = like.transfer._nixl is not None
    shares_memory = like.transfer._shares_memory
    with (
        counting_engine(nixl=by_nixl) as prefiller,
        counting_engine(shares_memory=shares_memory, nixl=by_nixl) as decoder,
    ):
        with Wire(prefill(prefiller.loop, greedy("a", PROMPT))) as wire:
            decode(decoder.loop, [greedy("a", PROMPT, remote=wire.remote)])
            assert decoder.counters["kv_blocks_pulled"] == 7
            return wire.passed


def test_a_connection_that_does_not_come_about_holds_no_request(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are threads, each with one that hangs: in time all are computed."""
    prefiller, decoder = engines
    asked = [greedy(f"r{number}", (number + 1, *PROMPT)) for number in range(MOST_PULLS + 2)]
    remotes = [prefill(prefiller.loop, one) for one in asked]
    hangs = threading.Event()
    monkeypatch.setattr(decoder.transfer, "_connect", lambda *_: hangs.wait(60))
    answers: dict[tuple[str, int], Answer] = {}
    for one, remote in zip(asked, remotes, strict=True):
        collect(answers, decoder.loop.handle(replace(one, remote=remote)))
    step(decoder.loop, answers)
    before = len(answers)
    decoder.clock.now += 5
    for _ in range(60):
        step(decoder.loop, answers)
    are_answered = [answers[one.request_id, 0].finish_reason is FinishReason.LENGTH for one in asked]
    hangs.set()
    decode(decoder.loop, [], answers)

    assert before == 0 and all(are_answered)
    assert decoder.counters["kv_pulls_failed"] == len(asked)


def test_a_prefiller_that_dies_costs_only_time(engines: tuple[Engine, Engine]) -> None:
    """Its address answers no more: everything is computed."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))
    prefiller.transfer.close()

    expect_answer(decode(decoder.loop, [greedy("a", PROMPT, remote=remote)]))


def test_a_lease_lasts_from_the_last_word_of_its_reader(engines: tuple[Engine, Engine]) -> None:
    """Thirty seconds without a word end it; a description is a word."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))
    prefiller.clock.now += LEASE - 1
    answers: dict[tuple[str, int], Answer] = {}
    most = int(0.75 * bytes_of_a_transfer(decoder))
    with Wire(remote, most, goes_silent=True) as wire:
        collect(answers, decoder.loop.handle(greedy("a", PROMPT, remote=wire.remote)))
        until(lambda: wire.passed == most, lambda: step(decoder.loop, answers))

        prefiller.clock.now += LEASE - 1
        assert not prefiller.loop.has_work()
        decoder.loop.handle(Abort("a"))
        decode(decoder.loop, [], answers)

    prefiller.clock.now += 1
    assert prefiller.loop.has_work()
    expect_nothing_held(prefiller)


def test_a_reply_that_is_aborted_while_its_blocks_come_leaves_nothing(engines: tuple[Engine, Engine]) -> None:
    """One of two goes, the other has its answer; then both go, and the blocks come back when the wire is let go."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))
    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, decoder.loop.handle(greedy("a", PROMPT, remote=remote, n=2)))
    collect(answers, decoder.loop.handle(Abort("a", 0)))
    decode(decoder.loop, [], answers)
    assert answers["a", 0].finish_reason is FinishReason.ABORT
    assert answers["a", 1].token_ids == continuation(PROMPT, 20)
    other, most = tuple(reversed(PROMPT)), int(0.9 * bytes_of_a_transfer(decoder))
    remote = prefill(prefiller.loop, greedy("b", other))

    with Wire(remote, most, goes_silent=True) as wire:
        collect(answers, decoder.loop.handle(greedy("b", other, remote=wire.remote, n=2)))
        until(lambda: wire.passed == most, lambda: step(decoder.loop, answers))
        collect(answers, decoder.loop.handle(Abort("b")))
        assert answers["b", 0].finish_reason is answers["b", 1].finish_reason is FinishReason.ABORT
        (coming,) = decoder.loop._transfers._coming.values()
        step(decoder.loop, answers)
        assert coming.is_given_up  # at once, and not when its time is up
        decode(decoder.loop, [], answers)

    assert decoder.loop.blocks.num_in_use == 0


def test_a_request_that_waits_for_its_blocks_is_known(engines: tuple[Engine, Engine]) -> None:
    """Its id is taken, and an engine that drains finishes it."""
    prefiller, decoder = engines
    remote = prefill(prefiller.loop, greedy("a", PROMPT))
    answers: dict[tuple[str, int], Answer] = {}
    with Wire(remote, 0, goes_silent=True) as wire:
        decoder.loop.handle(greedy("a", PROMPT, remote=wire.remote))
        (refused,) = decoder.loop.handle(greedy("a", PROMPT))
        assert "already in use" in str(refused)
        assert decoder.loop.handle(Drain()) == []
        wire.cut()
        events: list[Event] = []
        until(lambda: any(isinstance(event, Drained) for event in events), lambda: events.extend(decoder.loop.step()))
    collect(answers, events)

    expect_answer(answers)


def test_a_decoder_without_room_computes_when_it_has_some() -> None:
    """Blocks that come take no room from what runs; who waited too long goes into the queue."""
    with counting_engine() as prefiller, counting_engine(num_blocks=16) as decoder:
        remote = prefill(prefiller.loop, greedy("a", PROMPT, max_tokens=2))
        answers: dict[tuple[str, int], Answer] = {}
        collect(answers, decoder.loop.handle(greedy("full", range(100, 148), max_tokens=9)))
        step(decoder.loop, answers)
        collect(answers, decoder.loop.handle(greedy("a", PROMPT, max_tokens=2, remote=remote)))
        until(lambda: not decoder.loop.scheduler.replies, lambda: step(decoder.loop, answers))

        decode(decoder.loop, [], answers)

        expect_answer(answers)
        expect_answer(answers, "full", tuple(range(100, 148)))


def test_what_is_held_leaves_half_of_the_blocks_and_is_given_up() -> None:
    """The oldest lease ends where there are too many, and where a prompt finds no room beside them."""
    with counting_engine(num_blocks=16) as prefiller:
        for number in range(4):
            prefill(prefiller.loop, greedy(f"{number}", range(number * 50, number * 50 + 17)))
        step(prefiller.loop, {})
        assert prefiller.loop.blocks.num_in_use == 8

        answers: dict[tuple[str, int], Answer] = {}
        collect(answers, prefiller.loop.handle(greedy("long", range(200, 248), max_tokens=3)))
        until(lambda: not prefiller.loop.scheduler.replies, lambda: step(prefiller.loop, answers))

        expect_answer(answers, "long", tuple(range(200, 248)))
        expect_nothing_held(prefiller)


def test_the_host_tier_keeps_what_blocks_that_come_evict() -> None:
    """They are written only after what was there is copied out."""
    with counting_engine() as prefiller, counting_engine(num_blocks=12, num_host_blocks=20) as decoder:
        decode(decoder.loop, [greedy("before", range(100, 140), max_tokens=2)])
        remote = prefill(prefiller.loop, greedy("a", PROMPT))
        answers = decode(decoder.loop, [greedy("a", PROMPT, max_tokens=2, remote=remote)])
        assert decoder.counters["kv_blocks_pulled"] == 7

        again = decode(decoder.loop, [greedy("again", range(100, 140), max_tokens=2)])

        expect_answer(answers)
        expect_answer(again, "again", tuple(range(100, 140)))
        assert again["again", 0].events[-1].cached_tokens >= 32


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_of_many_tenants_on_wires_that_break(seed: int) -> None:
    """Two prefillers, a decoder with little room, drafts and preemptions: each answer is right, nothing is lost."""
    dice = random.Random(seed)
    fast: dict[str, Any] = {"speculative_method": "ngram"} if seed % 2 else {}
    with ExitStack() as stack:
        prefillers = [stack.enter_context(counting_engine(num_blocks=40)) for _ in range(2)]
        more: dict[str, Any] = {"num_host_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        decoder = stack.enter_context(counting_engine(num_blocks=24, **more, **fast))
        answers: dict[tuple[str, int], Answer] = {}
        asked: list[Generate] = []
        for number in range(24):
            length = dice.randrange(3, 40)
            prompt = tuple(dice.randrange(3) for _ in range(length)) if dice.random() < 0.5 else tuple(range(length))
            command = greedy(
                f"{number}", prompt, dice.randrange(1, 12), tenant=dice.choice("ab"), n=dice.choice((1, 1, 2))
            )
            asked.append(command)
            if len(prompt) > BLOCK and dice.random() < 0.8:
                remote = prefill(dice.choice(prefillers).loop, command)
                wire = stack.enter_context(breaking(remote, dice))
                command = replace(command, remote=wire.remote)
            collect(answers, decoder.loop.handle(command))
            for _ in range(dice.randrange(4)):
                if decoder.loop.has_work():
                    step(decoder.loop, answers)
            if dice.random() < 0.1:
                collect(answers, decoder.loop.handle(Abort(f"{number}")))
            decoder.clock.now += dice.choice((0, 0, 1))

        def step_in_time() -> None:
            step(decoder.loop, answers)
            decoder.clock.now += 0.2

        until(lambda: not decoder.loop.has_work(), step_in_time)

        for command in asked:
            for index in range(command.n):
                answer = answers[command.request_id, index]
                assert answer.token_ids == continuation(command.prompt_token_ids, len(answer.token_ids))
                whole = len(answer.token_ids) == command.sampling.max_tokens
                assert answer.finish_reason is FinishReason.ABORT or whole
        for engine in (*prefillers, decoder):
            expect_nothing_held(engine)


def breaking(remote: RemoteBlocks, dice: random.Random) -> Wire:
    """Return a wire that may break."""
    where = dice.choice((None, dice.randrange(1500)))
    if dice.random() < 0.3:
        return Wire(remote, spoilt=dice.randrange(1500))
    return Wire(remote, where, goes_silent=dice.random() < 0.5)
