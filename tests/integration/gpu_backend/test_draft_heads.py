# Heads that draft (MTP, EAGLE-3) in real engines of tiny models: every reply is token for token what it is without
# them, and their drafts are those that a head makes of the whole text at once, whatever became of its blocks.

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.loading import load_draft_model, load_part
from gpu_backend.execution.runner import Runner
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.draft_heads import DraftHead
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.grammar import is_available
from gpu_backend.step.messages import Generate
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
from gpu_backend.step.step_tensors import build_tensors
from tests.support.engine import Answer, answer_all, drafts_in, expect_short_replies, model_loop
from tests.support.kv_transfer import decode, exchanging, prefill
from tests.support.tiny_heads import write_calm_model, write_eagle_head, write_mtp_model
from tests.support.tiny_model import TinyModel

CPU = torch.device("cpu")
WARM = SamplingParams(max_tokens=16, temperature=0.7)
SCHEMA = '{"type":"object","properties":{"a":{"enum":["x","yy"]}},"required":["a"],"additionalProperties":false}'
ASKED = {
    "greedy": replace(WARM, temperature=0.0),
    "filters": replace(WARM, top_p=0.8, top_k=40, min_p=0.02, seed=2**63 - 5),
    "penalties": replace(WARM, presence_penalty=0.3, repetition_penalty=1.1, logit_bias=((5, 2.5), (77, -100.0))),
    "ends": replace(WARM, min_tokens=6, stop_token_ids=frozenset(range(0, 250, 9))),
    "scores": replace(WARM, logprobs=2, prompt_logprobs=1),
    "grammar": replace(WARM, max_tokens=30, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
    "short": replace(WARM, max_tokens=2),
    "plain": WARM,
}
PLAIN: dict[str, Any] = {"prefix_caching": False, "max_num_seqs": 1, "block_size": 4, "max_model_len": 96}
CHUNKS: dict[str, Any] = PLAIN | {
    "prefix_caching": True, "max_num_seqs": 8, "max_num_batched_tokens": 24, "num_kv_blocks": 30, "host_kv_bytes": 2**20
}  # fmt: skip
FLAT = StepCost(fixed=1.0, weights=0.0, token=1e-6, context=0.0, pair=0.0)
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": CHUNKS,
    "graphs": CHUNKS | {"async_scheduling": True, "cuda_graphs": True, "num_kv_blocks": 200},
    "swaps": CHUNKS | {"copy_seconds": 0.0, "step_cost": FLAT, "step_stretch": 1e9},
}
Models = dict[str, tuple[Path, dict[str, Any]]]
Replies = dict[tuple[str, int], Answer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each method's model, and its settings."""
    folder, llama = tmp_path_factory.mktemp("heads"), TinyModel(num_layers=3)
    deepseek = TinyModel("DeepseekV3ForCausalLM", extra={"first_k_dense_replace": 1})
    head = str(write_eagle_head(folder / "head", llama, drafted=230, agrees=True))
    eagle3 = {"speculative_method": "eagle3", "speculative_model": head, "num_speculative_tokens": 3}
    mtp = {"speculative_method": "mtp", "num_speculative_tokens": 3}
    return {
        "eagle3": (write_calm_model(folder / "llama", llama), eagle3),
        "mtp": (write_mtp_model(folder / "mtp", deepseek, True, with_tokenizer=True), mtp),
    }


def asked() -> list[Generate]:
    """Ask for all features, of prompts some of which begin alike and are longer than a chunk."""
    dice = random.Random(5)
    commands = []
    for number, (name, sampling) in enumerate(ASKED.items()):
        if sampling.grammar is None or is_available():
            prompt = (*range(60, 69), *(dice.randrange(250) for _ in range(dice.randrange(3, 25))))
            seed = sampling.seed or number
            commands.append(Generate(name, prompt, replace(sampling, seed=seed), n=1 + (name == "filters")))
    return [*commands, Generate("one token", (9,), WARM)]


@pytest.fixture(scope="module")
def alone(models: Models) -> dict[str, Replies]:
    """Return each model's replies, one after the other and without drafts."""
    found: dict[str, Replies] = {}
    for method, (folder, _) in models.items():
        loop, found[method] = model_loop(folder, **PLAIN), {}
        for command in asked():
            found[method] |= answer_all(loop, [command])
    return found


def tokens_of(replies: Replies) -> dict[tuple[str, int], list[int]]:
    return {key: reply.token_ids for key, reply in replies.items()}


# With graphs they are in the sample of test_composition.py, too.
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.soak] * (name == "graphs")) for name in ENGINES]
)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_replies_in_a_busy_engine_are_those_alone(
    method: str, engine: str, models: Models, alone: dict[str, Replies]
) -> None:
    """Preempted, swapped, resumed, from a cache and from graphs; greedy, sampled, penalised or by a grammar."""
    folder, speculation = models[method]
    loop, expected = model_loop(folder, **ENGINES[engine], **speculation), alone[method]
    expect_short_replies(loop)
    known = tuple(expected["plain", 0].token_ids[:5])
    commands = [replace(c, resume_token_ids=known) if c.request_id == "plain" else c for c in asked()]

    found = answer_all(loop, commands)
    again = answer_all(loop, commands[:2])

    assert tokens_of(found) == tokens_of(expected) | {("plain", 0): expected["plain", 0].token_ids[5:]}
    assert tokens_of(again).items() <= tokens_of(expected).items()
    speculator, running = loop.scheduler.speculator, loop.scheduler.running
    assert speculator is not None
    assert 0.1 * speculator.num_draft_tokens < speculator.num_held < speculator.num_draft_tokens
    assert loop.scheduler.tables.prompt_tokens_found > 0
    assert (running.num_preempted > 0) == (engine != "graphs")
    assert running.num_swapped == (running.num_preempted if engine == "swaps" else 0)


class WholeText:
    """Makes a head's drafts of a whole text: the model's states in one step, the head's in another, from no cache."""

    def __init__(self, folder: Path, speculation: dict[str, Any]) -> None:
        whole = load_model_config(folder)
        config = engine_config(str(folder), device="cpu", **speculation)
        model = load_part(config, whole, None, CPU, torch.float32, 128)
        self.head, reader = load_draft_model(config, whole, model, CPU, torch.float32, 128)
        assert isinstance(self.head, DraftHead)
        self.model = replace(model, reader=reader)
        layers = self.head.features.layers_beside(whole.kv_floats_per_token // whole.num_layers, torch.float32)
        self.head.features.open(torch.zeros(layers, 9, 16, *whole.kv_shape))

    def compute(self, part: Any, token_ids: tuple[int, ...], start: int, cache: torch.Tensor) -> torch.Tensor:
        table = tuple(range(-(-(start + len(token_ids)) // 16)))
        step = SequenceStep(0, token_ids, start, table, True, SamplingParams(1), 0)
        tensors = build_tensors(StepPlan(0, (step,)), Grouping(16, 8, 128, CPU, torch.float32), CPU)
        found: torch.Tensor = part.hidden_states(tensors, cache)
        return found

    @torch.inference_mode()
    def drafts(self, text: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the likeliest drafts behind a text."""
        assert isinstance(self.head, DraftHead)
        caches = [torch.zeros(p.config.num_layers, 9, 16, *p.config.kv_shape) for p in (self.model, self.head)]
        self.compute(self.model, text[:-1], 0, caches[0])
        hidden = self.compute(self.head, text[1:], 0, caches[1])[-1:]
        found = [int(self.head.logits(hidden).argmax())]
        for place in range(len(text) - 1, len(text) + count - 2):
            self.head.features.put(torch.tensor([place]), hidden)
            hidden = self.compute(self.head, (found[-1],), place, caches[1])
            found.append(int(self.head.logits(hidden).argmax()))
        return tuple(found)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts_are_those_of_the_whole_text(method: str, engine: str, models: Models) -> None:
    """Whether a head has caught up in pieces, found its blocks filled, or drafted for the last step."""
    folder, speculation = models[method]
    # A place that two share may have been computed for the other's next token, so that no two prompts begin alike.
    commands = [
        Generate(str(i), tuple(range(20 * i, 20 * i + 9 + 5 * i)), replace(ASKED["greedy"], max_tokens=12))
        for i in range(5)
    ]
    loop = model_loop(folder, **ENGINES[engine] | {"num_kv_blocks": 24 if engine == "chunks" else 200}, **speculation)
    made = note_drafts(loop)

    answer_all(loop, commands)
    answer_all(loop, [replace(command, request_id=f"{command.request_id} again") for command in commands])

    whole = WholeText(folder, speculation)
    assert len(made) > 10
    for text, drafts in made[::3]:
        assert whole.drafts(text, len(drafts)) == drafts


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_draw_with_the_noise_of_a_token_s_place(method: str, models: Models) -> None:
    """With graphs and without: with the noise of the place before, next to none would hold at such a temperature."""
    folder, speculation = models[method]
    made, held = [], []
    for cuda_graphs in (False, True):
        loop = model_loop(folder, **PLAIN, **speculation, cuda_graphs=cuda_graphs)
        made.append(note_drafts(loop))
        answer_all(loop, [Generate("x", tuple(range(9)), SamplingParams(60, temperature=1.5))])
        assert loop.scheduler.speculator is not None
        held.append(loop.scheduler.speculator.num_held / loop.scheduler.speculator.num_draft_tokens)

    assert made[0] == made[1]
    assert held[0] == held[1] > 0.25


def note_drafts(loop: EngineLoop) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what will have each text for which a loop's head drafts, and its drafts."""
    assert isinstance(loop.runner, Runner) and loop.runner._draft_model is not None
    complete, made = loop.runner._draft_model.complete, []

    def note(plan: StepPlan) -> StepPlan:
        plan = complete(plan)
        for step in plan.sequences:
            if step.num_draft_tokens:
                text = tuple(loop.scheduler.running.by_id[step.sequence_id].token_ids)
                made.append((text, drafts_in(loop, step)))
        return plan

    loop.runner._draft_model.complete = note  # type: ignore[method-assign]
    return made


def test_blocks_come_with_what_a_head_reads(models: Models, alone: dict[str, Replies]) -> None:
    """An engine goes on with blocks of one with the same head; one without has others, and the prompt is computed."""
    folder, speculation = models["eagle3"]
    settings = PLAIN | {"prefix_caching": True, "num_kv_blocks": 256, "batch_invariant": True}
    commands = [command for command in asked() if command.request_id in ("greedy", "plain")]
    pulled = []
    for drafts in (speculation, {}):
        with contextlib.ExitStack() as stack:
            prefiller = model_loop(folder, **settings, **drafts, transfer=exchanging(stack))
            decoder = model_loop(folder, **settings, **speculation, transfer=exchanging(stack))
            made = note_drafts(decoder)
            found = decode(decoder, [replace(command, remote=prefill(prefiller, command)) for command in commands])
            pulled.append(decoder.load().counters["kv_blocks_pulled"])

        assert tokens_of(found) == {key: alone["eagle3"][key].token_ids for key in found}
        greedy = [(text, drafts) for text, drafts in made if text[9] == commands[0].prompt_token_ids[9]]
        assert greedy
        assert all(WholeText(folder, speculation).drafts(text, len(drafts)) == drafts for text, drafts in greedy[:3])

    assert pulled[0] > 0 == pulled[1]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        ("eagle3", {"tensor_parallel_size": 2}),
        ("mtp", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
)
def test_heads_draft_for_ranks(method: str, ranks: dict[str, int], models: Models, alone: dict[str, Replies]) -> None:
    """The first rank has the head, whole, and what it reads."""
    folder, speculation = models[method]
    loop = model_loop(folder, **CHUNKS, **speculation, **ranks)
    assert isinstance(loop.runner, Runner)
    try:
        assert tokens_of(answer_all(loop, asked())) == tokens_of(alone[method])
        assert loop.scheduler.speculator is not None
        assert loop.scheduler.speculator.num_held > 0.1 * loop.scheduler.speculator.num_draft_tokens
    finally:
        loop.runner.close()
