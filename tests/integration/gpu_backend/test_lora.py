# LoRA adapters: what an engine says with one is what the model says with it merged into its weights, whatever other
# adapters are in the batch and however it is computed.

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.lora.peft import LowRank
from gpu_backend.lora.slots import AdaptedLinear, AdapterSlots
from gpu_backend.models.quantization import quantize
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.block_events import BlockStored
from gpu_backend.step.config import KvEventsConfig
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import AdapterLoaded, Embed, Generate, LoadAdapter, UnloadAdapter
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import (
    Answer,
    answer_all,
    collect,
    counting_loop,
    expect_short_replies,
    finish,
    greedy,
    model_loop,
)
from tests.support.tiny_lora import ALL, TinyAdapter, write_adapter, write_merged
from tests.support.tiny_model import TinyModel, write_tiny_model

MODEL = TinyModel("Qwen3ForCausalLM")
ADAPTERS = (
    TinyAdapter(seed=1),
    TinyAdapter(seed=2, rank=7, alpha=3.0, modules=("q_proj", "v_proj"), rslora=True),
    TinyAdapter(seed=3, rank=16, modules=ALL[3:]),
)
NAMES = ("everything", "queries and values", "the rest")
DICE = random.Random(7)
PROMPTS = [tuple(DICE.randrange(250) for _ in range(length)) for length in (30, 39)]
FLAT = StepCost(fixed=1.0, weights=0.0, token=1e-6, context=0.0, pair=0.0)  # of a step: copies pay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its adapters, and the model with each of them merged into it, in folders of their names."""
    folder = tmp_path_factory.mktemp("lora")
    write_tiny_model(folder / "model", MODEL)
    for name, adapter in zip(NAMES, ADAPTERS, strict=True):
        write_adapter(folder / name, adapter, MODEL)
        write_merged(folder / f"merged {name}", adapter, MODEL)
    return folder


def modules(folder: Path, *names: str) -> tuple[Adapter, ...]:
    return tuple(Adapter(number, name, str(folder / name)) for number, name in enumerate(names or NAMES, 1))


def asked(folder: Path, max_tokens: int = 10) -> list[Generate]:
    """Each prompt by each adapter and by none, those of equal prompts after each other."""
    adapters = (None, *modules(folder))
    return [
        greedy(f"{prompt} by {adapter.name if adapter else 'none'}", PROMPTS[prompt], max_tokens, adapter=adapter)
        for prompt, adapter in itertools.product(range(len(PROMPTS)), adapters)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """What models with merged weights say, each request alone."""
    loops = {name: model_loop(folder / f"merged {name}") for name in NAMES} | {None: model_loop(folder / "model")}
    said = {}
    for command in asked(folder):
        loop = loops[command.adapter.name if command.adapter else None]
        said[command.request_id] = answer_all(loop, [replace(command, adapter=None)])[command.request_id, 0].token_ids
    return said


def tokens(answers: dict[tuple[str, int], Answer]) -> dict[str, list[int]]:
    assert [answer.error for answer in answers.values() if answer.error] == []
    return {request_id: answer.token_ids for (request_id, _), answer in answers.items()}


FEW_BLOCKS = {"num_kv_blocks": 28, "block_size": 4, "max_model_len": 60}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 12},
    "graphs": {"cuda_graphs": True},
    "ngram": {"speculative_method": "ngram"},
    "ngram from graphs": {"speculative_method": "ngram", "cuda_graphs": True, "async_scheduling": True},
    "the same bits": {"batch_invariant": True},
    "preemption": FEW_BLOCKS,
    "swaps": {**FEW_BLOCKS, "host_kv_bytes": 1 << 20, "step_cost": FLAT, "step_stretch": 1e9},
}
AT_ONCE = ("chunks", "ngram from graphs", "the same bits", "swaps")  # all cases in a soak


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.soak] * (name not in AT_ONCE)) for name in CASES],
)
def test_a_mixed_batch_says_what_each_says_alone(folder: Path, expected: dict[str, list[int]], case: str) -> None:
    """Rows with any adapter or none, in one step: token for token what models of merged weights say."""
    loop = model_loop(folder / "model", lora_modules=modules(folder), copy_seconds=0.0, **CASES[case])
    if "num_kv_blocks" in CASES[case]:
        expect_short_replies(loop)

    commands = asked(folder)[: 4 if case == "the same bits" else None]  # token by token, which takes its time
    known = {command.request_id: expected[command.request_id] for command in commands}

    assert tokens(answer_all(loop, commands)) == known
    assert tokens(answer_all(loop, commands)) == known  # now from the cache
    if "num_kv_blocks" in CASES[case]:
        running = loop.scheduler.running
        assert running.num_preempted and (case != "swaps" or running.num_swapped)


def test_a_draft_model_drafts_for_all_adapters(folder: Path, expected: dict[str, list[int]]) -> None:
    """Without any of them: what it drafts is verified."""
    drafts = {"speculative_method": "draft", "speculative_model": str(folder / "model"), "num_speculative_tokens": 2}
    loop = model_loop(folder / "model", lora_modules=modules(folder), **drafts)

    assert tokens(answer_all(loop, asked(folder))) == expected


def prompt_scores(loop: EngineLoop, adapter: Adapter | None) -> Tensor:
    scored = SamplingParams(1, 0.0, prompt_logprobs=0)
    answer = answer_all(loop, [Generate("x", PROMPTS[1], scored, adapter=adapter)])["x", 0]
    return torch.tensor([score.logprob for event in answer.events for score in event.prompt_scores])


@pytest.mark.parametrize("method", ["fp8", "int8", "w8a8", "int4"])
def test_adapters_are_whole_beside_rounded_weights(method: str) -> None:
    """What is added to a product of fewer bits is what is added to none."""
    dice = torch.Generator().manual_seed(3)
    x, base = torch.randn(5, 64, generator=dice), torch.randn(48, 64, generator=dice)
    a, b = torch.randn(3, 64, generator=dice), torch.randn(48, 3, generator=dice)
    slots = AdapterSlots(2, 4)
    product = quantize(base, torch.randn(48, generator=dice), method)
    own = AdaptedLinear(product, torch.zeros(2, 4, 64), torch.zeros(2, 48, 4), (48,), slots)
    own.fill(1, 0, LowRank(a, b))
    alone = own(x)
    slots.rows = torch.tensor([1, -1, 1, 0, -1], dtype=torch.int32)

    assert torch.equal(alone, product(x))
    torch.testing.assert_close(own(x) - alone, x @ (b @ a).t() * torch.tensor([[1.0], [0], [1], [0], [0]]))


def test_outliers_stay_where_adapters_were_trained_to_find_them(tmp_path: Path) -> None:
    """Of int8 weights: an adapter's scores are as near the merged model's as the model's own are to what it was."""
    adapter = TinyAdapter()
    write_tiny_model(tmp_path / "model", MODEL)
    write_merged(tmp_path / "merged", adapter, MODEL)
    own = Adapter(1, "own", str(write_adapter(tmp_path / "own", adapter, MODEL)))

    def scores(folder: str, of: Adapter | None = None, **settings: Any) -> Tensor:
        return prompt_scores(model_loop(tmp_path / folder, **settings), of)

    int8: dict[str, Any] = {"quantization": "int8"}
    error = (scores("model", own, lora_modules=(own,), **int8) - scores("merged")).norm()

    assert 0 < error < 2 * (scores("model", **int8) - scores("model")).norm()


class Counting(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_without_adapters_costs_nothing_more(folder: Path) -> None:
    """It is the same operations, as many of each, as in an engine that has none."""

    def operations(commands: Sequence[Generate], **settings: Any) -> Counter[str]:
        loop = model_loop(folder / "model", **settings)
        with Counting() as counted:
            answer_all(loop, commands)
        return counted.found

    plain = [replace(command, adapter=None) for command in asked(folder, 3)[2:6]]
    without = operations(plain)
    beside = operations(plain, lora_modules=modules(folder))
    used = operations(asked(folder, 3)[2:6], lora_modules=modules(folder))

    assert beside == without
    assert used.total() > without.total()


def test_no_adapter_finds_what_another_has_cached(folder: Path) -> None:
    """Nor does the model alone, for one tenant, beginnings that all tenants share included; routers are told whose."""
    everything, queries, _ = modules(folder)
    prompt = tuple(range(40))
    told = KvEventsConfig(enable_kv_cache_events=True)
    loop, _ = counting_loop(64, block_size=4, shared_prefixes=(prompt[:16],), kv_events=told)
    loop._adapters = model_loop(folder / "model", lora_modules=modules(folder))._adapters

    def found(adapter: Adapter | None, tenant: str = "t") -> int:
        command = greedy(f"{adapter} {tenant}", prompt, 2, adapter=adapter, tenant=tenant)
        return answer_all(loop, [command])[command.request_id, 0].events[-1].cached_tokens

    assert [found(who) for who in (None, everything, queries)] == [0, 0, 0]
    assert [found(who) for who in (None, everything, queries)] == [36, 36, 36]
    assert [found(who, "u") for who in (None, everything, queries)] == [16, 0, 0]
    stored = [event for event in loop.take_block_events() if isinstance(event, BlockStored)]
    assert {(event.lora_id, event.lora_name) for event in stored} == {(None, None), (1, NAMES[0]), (2, NAMES[1])}
    assert len({block for event in stored for block in event.block_hashes}) == 3 * 10 + 6 + 2 * 10


def test_adapters_come_and_go_while_replies_run(folder: Path, expected: dict[str, list[int]]) -> None:
    """No reply stops for it; one that has an adapter keeps it to its end, and its place is free afterwards."""
    first, second, third = modules(folder)
    settings = {"lora_modules": (first,), "max_loras": 2, "allow_runtime_lora_updating": True}
    loop = model_loop(folder / "model", **settings)
    by_name = {command.request_id: command for command in asked(folder)}
    answers: dict[tuple[str, int], Answer] = {}
    heard: list[AdapterLoaded] = []

    def hear(events: Any) -> None:
        heard.extend(event for event in events if isinstance(event, AdapterLoaded))
        collect(answers, [event for event in events if not isinstance(event, AdapterLoaded)])

    def ask(request_id: str) -> None:
        collect(answers, loop.handle(by_name[request_id]))

    ask(f"0 by {first.name}")
    ask(f"1 by {second.name}")
    assert "not loaded" in str(answers.pop((f"1 by {second.name}", 0)).error)
    hear(loop.handle(LoadAdapter(second)))
    while not heard:
        hear(loop.step())
    ask(f"1 by {second.name}")
    hear(loop.handle(LoadAdapter(third)))
    assert heard[0] == AdapterLoaded(2) and "room for 2" in str(heard[1].problem)
    hear(loop.step())
    hear(loop.handle(UnloadAdapter(first.number)))
    ask(f"1 by {first.name}")
    assert "not loaded" in str(answers.pop((f"1 by {first.name}", 0)).error)
    assert not answers[f"0 by {first.name}", 0].finish_reason, "it goes on"
    while not all(answer.finish_reason for answer in answers.values()) or loop.has_work():
        hear(loop.step())
    hear(loop.handle(LoadAdapter(replace(third, folder=str(folder)))))
    while len(heard) < 3:
        hear(loop.step())
    assert "adapter_config.json" in str(heard[2].problem)
    hear(loop.handle(LoadAdapter(third)))
    while len(heard) < 4:
        hear(loop.step())
    assert heard[3] == AdapterLoaded(3)
    ask(f"0 by {third.name}")
    finish(loop, answers)

    assert tokens(answers) == {request_id: expected[request_id] for request_id, _ in answers}
    assert len(answers) == 3


def test_the_place_of_an_unloaded_adapter_is_free_at_once(folder: Path) -> None:
    """Also where the engine hears of both between two steps; where a reply still has it, there is no room."""
    first, second, third = modules(folder)
    loop = model_loop(folder / "model", lora_modules=(first,), max_loras=1, allow_runtime_lora_updating=True)
    by_name = {command.request_id: command for command in asked(folder, 3)}

    told = [*loop.handle(UnloadAdapter(first.number)), *loop.handle(LoadAdapter(second))]
    while not told:
        told += loop.step()
    loop.handle(by_name[f"0 by {second.name}"])
    loop.handle(UnloadAdapter(second.number))
    (refused,) = loop.handle(LoadAdapter(third))

    assert told == [AdapterLoaded(second.number)]
    assert isinstance(refused, AdapterLoaded) and "room for 1" in str(refused.problem)


def test_load_reports_name_adapters_and_embeddings_take_them(folder: Path) -> None:
    """Those of replies that run and of replies that wait."""
    first, second, _ = modules(folder)
    loop = model_loop(folder / "model", lora_modules=modules(folder), max_num_seqs=1)
    loop.handle(greedy("a", PROMPTS[0], 3, adapter=first))
    loop.handle(greedy("b", PROMPTS[0], 3, adapter=second))
    loop.step()
    load = loop.load()
    finish(loop, {})
    own = answer_all(loop, [Embed("e", PROMPTS[1], adapter=first)])["e", 0].vector
    merged = answer_all(model_loop(folder / f"merged {first.name}"), [Embed("e", PROMPTS[1])])["e", 0].vector

    assert (load.running_adapters, load.waiting_adapters) == ((first.name,), (second.name,))
    torch.testing.assert_close(torch.tensor(own), torch.tensor(merged), atol=1e-5, rtol=1e-4)
