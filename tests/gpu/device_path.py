# What the engine does on a CUDA device beside arithmetic, on a card that is simulated: nothing of the host's is read as
# the device's, the host waits for a step's result alone, graphs hold what they need, no step compiles a kernel anew.

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution import graphs, runner
from gpu_backend.execution.device_step import DeviceStep
from gpu_backend.execution.graphs import Drawing
from gpu_backend.execution.runner import Runner
from gpu_backend.kernels import ops
from gpu_backend.lora.loading import load_adapters
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Embed, Generate
from gpu_backend.step.plan import StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, require
from tests.gpu.simulated_card import Card, simulated_card
from tests.support.engine import answer_all, draft_from, expect_short_replies, scripted_drafts
from tests.support.tiny_heads import write_calm_model, write_eagle_head, write_mtp_model
from tests.support.tiny_lora import TinyAdapter, write_adapter
from tests.support.tiny_model import TinyModel, write_tiny_model

FLOAT32 = (torch.float32,)
TOKENS_COST = StepCost(fixed=1.0, weights=0.0, token=1.0, context=0.0, pair=0.0)
DRAFTS_PAY = StepCost(fixed=1.0, weights=0.0, token=0.0, context=0.0, pair=0.0)


def decodes(setting: Setting) -> str:
    """Drawn and greedy replies, their steps overlapping, wait once a step, for its result."""
    card, loop = _compare(setting, [_ask(1, 7, temperature=0.9), _ask(2, 7, given=12)])
    require(card.replays > 4, f"only {card.replays} replays")
    cleared = [name for name in card.launches if "index_fill" in name]
    require(not cleared, f"{cleared}: kernels read no further than is written, and each layer's is a launch of its own")
    return f"{loop._meter.steps} steps, {card.replays} replays, {len(card.compiled)} kernels compiled"


def sampling_parameters(setting: Setting) -> str:
    """Log-probabilities, penalties, biases, least lengths, scores of prompts and embeddings wait for nothing either."""
    asked = [
        _ask(1, 4, logprobs=2), _ask(2, 4, logprobs=4, top_p=0.8),
        _ask(3, 4, presence_penalty=0.5, repetition_penalty=1.2), _ask(5, 3, prompt_logprobs=1),
        _ask(4, 4, logit_bias=((5, 3.0),), min_tokens=3, stop_token_ids=frozenset(range(50))),
    ]  # fmt: skip
    card, _ = _compare(setting, [*asked, Embed("e", tuple(range(20)))], max_num_seqs=6)
    lists = [key for key in card.compiled if key[0] == "shortlist_kernel"]
    require(len(lists) <= 2, f"{len(lists)} kernels for 1, 2 and 4 log-probabilities")
    return f"{len(card.compiled)} kernels compiled"


def one_asks_for_more(setting: Setting) -> str:
    """A reply that is penalised and reported is sampled by itself, the others by their graph; what it says is counted
    where it is drawn, and nothing waits for it.
    """
    sampled: list[int] = []
    sample_others = DeviceStep._sample_others

    def note(step: DeviceStep, drawing: Drawing) -> None:
        sampled.append(len(drawing.where))
        sample_others(step, drawing)

    asked = [
        _ask(1, 9, temperature=0.9),
        _ask(2, 9),
        _ask(3, 9, repetition_penalty=1.3, presence_penalty=1, logprobs=1),
    ]
    with patch.object(DeviceStep, "_sample_others", note):
        card, _ = _compare(setting, asked)
    require(len(sampled) > 2 and set(sampled) == {1}, f"sampled by themselves: {sampled}")
    return f"{len(sampled)} steps, {card.replays} replays"


def swaps(setting: Setting) -> str:
    """Blocks go to host memory and back while the host goes on."""
    commands = [_ask(3, 14), _ask(4, 14)]
    sizes = {"block_size": 4, "max_model_len": 32, "num_kv_blocks": 10, "host_kv_bytes": 1 << 20}
    _, loop = _compare(setting, commands, {"copy_seconds": 1e-9}, step_cost=TOKENS_COST, **sizes)
    require(loop.scheduler.running.num_swapped > 0, "no sequence was swapped out")
    return f"{loop.scheduler.running.num_swapped} sequences swapped out"


def drafts(setting: Setting) -> str:
    """Drafts from the text, verified in graphs, each step when the last one's are judged."""
    commands = [_ask(1, 12, temperature=0.8), _ask(2, 12)]
    settings = {"speculative_method": "ngram", "num_speculative_tokens": 3, "step_cost": DRAFTS_PAY,
                "async_scheduling": False}  # fmt: skip
    card, loop = _compare(setting, commands, draft=True, **settings)
    require(loop.load().counters["accepted_tokens"] > 4 and card.replays > 2, "hardly a draft was verified in a graph")
    return f"{loop.load().counters['accepted_tokens']:.0f} drafts held"


def drafts_ahead(setting: Setting) -> str:
    """The device drafts, verifies and goes on before the host knows what held; blocks and places are its own."""
    commands = [_ask(1, 16, temperature=0.8), _ask(2, 14), _ask(3, 18, top_p=0.7, temperature=1.0)]
    settings = {"speculative_method": "ngram", "num_speculative_tokens": 3, "step_cost": DRAFTS_PAY, "block_size": 4}
    card, loop = _compare(setting, commands, ahead=0.75, **settings)
    counters, launched = loop.load().counters, card.launches["propose_drafts_kernel"]
    require(counters["accepted_tokens"] > 4 and card.replays + launched > 4, f"{counters}, {card.launches}")
    return f"{counters['accepted_tokens']:.0f} drafts held, {loop._meter.steps} steps, {card.replays} replays"


def draft_models(setting: Setting) -> str:
    """A draft model and heads draft, and are verified, without a wait between; features lie in the cache's layers."""
    held, launched = [], 0
    for method in ("draft", "eagle3", "mtp"):
        settings = {"speculative_method": method, "num_speculative_tokens": 2, "block_size": 4}
        card, loop = _compare(setting, [_ask(1, 6, temperature=1.5)], **settings)
        held.append(loop.load().counters["accepted_tokens"])
        launched += card.replays + card.launches["accept_kernel"]
    require(sum(held) > 2 and launched > 5, f"{held} drafts held, {launched} drawings of decodes")
    return f"{held} drafts held, {launched} drawings of decodes"


def few_bits(setting: Setting) -> str:
    """Rounded weights and caches go through the same way; float8, which the interpreter rounds wrongly, unjudged."""
    for settings in (
        {"quantization": "w8a8"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
    ):
        _compare(setting, [_ask(1, 6)], judges="fp8" not in settings.values(), **settings)
    return "w8a8, int4, float8"


def experts(setting: Setting) -> str:
    """Decodes are replayed wherever their tokens are routed, and no routing is waited for."""
    shape = _mixture(setting, number=12)
    card, _ = _compare(setting, [_ask(1, 7, temperature=0.9), _ask(2, 7, given=12)], shape=shape)
    require(card.replays > 4, f"only {card.replays} replays")
    return f"{card.replays} replays"


def latent_vectors(setting: Setting) -> str:
    """Attention over latent vectors, with experts in groups: prompts and decodes, which are replayed."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    seed = 2 * setting.dice.getrandbits(30)
    shape = TinyModel("DeepseekV3ForCausalLM", num_experts=8, seed=seed, extra=sizes | groups)
    card, _ = _compare(setting, [_ask(1, 7, temperature=0.9), _ask(2, 7, given=12)], shape=shape)
    require(card.replays > 4, f"only {card.replays} replays")
    lengths(setting, TinyModel("YoutuForCausalLM", num_layers=1, seed=seed, extra=sizes))
    return f"{card.replays} replays, {card.launches['attend_latent_kernel']} launches of attention beside them"


def states(setting: Setting) -> str:
    """Linear attention: decodes in graphs, each from its own state, also where a graph begins it."""
    seed = 2 * setting.dice.getrandbits(30)
    shape = TinyModel("Qwen3_5ForCausalLM", num_layers=2, intermediate_size=128, seed=seed)
    card, _ = _compare(setting, [_ask(1, 7, temperature=0.9), _ask(4, 7, given=1)], shape=shape)
    require(card.replays > 4, f"only {card.replays} replays")
    return f"{card.replays} replays, {card.launches['delta_step_kernel']} launches of the delta rule beside them"


def adapters(setting: Setting) -> str:
    """Replies with any adapter or none go through one graph, and those of none alone through one without them."""
    shape = TinyModel("Qwen3ForCausalLM", num_layers=1, intermediate_size=128, seed=setting.dice.getrandbits(31))
    with tempfile.TemporaryDirectory() as name:
        folders = [write_adapter(Path(name) / str(seed), TinyAdapter(seed, rank=3 * seed), shape) for seed in (1, 2)]
        both = tuple(Adapter(number, str(number), str(folder)) for number, folder in enumerate(folders, 1))
        mixed = [replace(_ask(1, 7), adapter=both[0]), _ask(2, 7, given=12), replace(_ask(3, 7), adapter=both[1])]
        card, _ = _compare(setting, mixed, shape=shape, lora_modules=both)
        plain, _ = _compare(setting, [_ask(1, 7), _ask(2, 7)], shape=shape, lora_modules=both)
    require(card.replays > 4 and card.launches["expand_kernel"] > 0, f"{card.replays} replays, {card.launches}")
    require(not plain.launches["shrink_kernel"] + plain.launches["expand_kernel"], f"{plain.launches} without adapters")
    return f"{card.replays} replays"


def lengths_of_experts(setting: Setting) -> str:
    """The same as of lengths: an expert may have few rows or many."""
    return lengths(setting, _mixture(setting, number=3))


def lengths(setting: Setting, shape: TinyModel | None = None) -> str:
    """Batches of any size, prompts and contexts of any length launch what earlier ones have compiled."""
    dice = setting.dice
    with tempfile.TemporaryDirectory() as name, simulated_card() as card:
        loop = _engine("cuda", _model(setting, Path(name), shape), max_model_len=500, cuda_graphs=False)
        assert isinstance(loop.runner, Runner)
        with patch.object(runner, "measure_roofline"):
            loop.runner.warm_up()
        before = len(card.compiled)
        for part in range(2):
            commands = [_ask(10 * part + i, 2, dice.choice((1, 9, 40, 60)), top_p=0.9) for i in range(2)]
            answer_all(loop, commands)
    anew = list(card.compiled)[before:]
    require(not anew, f"compiled while requests waited: {anew}")
    return f"{before} kernels for all of them"


def _compare(
    setting: Setting,
    commands: list[Any],
    limits: dict[str, Any] | None = None,
    judges: bool = True,
    draft: bool = False,
    ahead: float | None = None,
    shape: TinyModel | None = None,
    **settings: Any,
) -> tuple[Card, EngineLoop]:
    """Answer on the CPU and on the card; return what the latter did.

    Tokens must be equal, and nothing but results be waited for.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = _model(setting, Path(name), shape)
        settings |= _draft_model(setting, folder, settings.get("speculative_method"))
        said = answer_all(_engine("cpu", folder, limits, **settings), commands)
        with simulated_card() as card, patch.object(EngineLoop, "_survive", _raise):
            loop = _engine("cuda", folder, limits, **settings)
            if draft:
                draft_from(loop, {key: answer.token_ids for key, answer in said.items()}, 0.7)
            elif loop.scheduler.speculator is not None and ahead is None:
                loop.scheduler.speculator.economics.is_forced = True
            expect_short_replies(loop)
            propose = ops.propose_drafts
            if ahead is not None:
                tokens = {key: answer.token_ids for key, answer in said.items()}
                propose = scripted_drafts(commands, tokens, ahead, torch.device("cuda", 0))
            with patch.object(graphs, "propose", propose):
                card.waits.clear()
                answers = answer_all(loop, commands)
    steps = loop._meter.steps
    require(set(card.waits) <= {"an event"}, f"the host waited for more than results: {dict(card.waits)}")
    require(card.waits["an event"] <= steps, f"{card.waits['an event']} waits in {steps} steps")
    for key, answer in answers.items() if judges else ():
        require(
            answer.token_ids == said[key].token_ids, f"reply {key} is {answer.token_ids}, not {said[key].token_ids}"
        )
    return card, loop


def _engine(device: str, folder: Path, limits: dict[str, Any] | None = None, **settings: Any) -> EngineLoop:
    settings = {"num_kv_blocks": 40, "max_num_seqs": 3, "max_model_len": 64, "dtype": "float32"} | settings
    config, model = engine_config(str(folder), device=device, **settings), load_model_config(folder)
    made = Runner(config, model)
    known = Limits(made.max_model_len, model.vocab_size, num_host_blocks=made.num_host_blocks, **limits or {})
    adapters = load_adapters(config.lora, made.adapters, model)
    return EngineLoop(config, made, made.num_blocks, known, adapters=adapters)


def _model(setting: Setting, folder: Path, shape: TinyModel | None = None) -> Path:
    plain = TinyModel("Qwen3ForCausalLM", num_layers=1, intermediate_size=128, seed=setting.dice.getrandbits(31))
    return write_tiny_model(folder / "model", shape or plain)


def _draft_model(setting: Setting, folder: Path, method: str | None) -> dict[str, str]:
    """Write what drafts, if anything does; return the setting that names it."""
    shape = TinyModel(num_layers=3, num_kv_heads=4, intermediate_size=128, seed=setting.dice.getrandbits(31))
    if method == "draft":
        return {"speculative_model": str(folder)}
    if method == "eagle3":
        write_calm_model(folder, shape)
        return {"speculative_model": str(write_eagle_head(folder / "head", shape, agrees=True))}
    if method == "mtp":
        sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
        sizes |= {"first_k_dense_replace": 0}
        write_mtp_model(folder, replace(shape, architecture="DeepseekV3ForCausalLM", num_layers=1, extra=sizes), True)
    return {}


def _mixture(setting: Setting, number: int) -> TinyModel:
    seed = setting.dice.getrandbits(31)
    return TinyModel("Qwen3MoeForCausalLM", num_layers=1, intermediate_size=64, num_experts=number, seed=seed)


def _ask(number: int, tokens: int, given: int = 0, **wish: Any) -> Generate:
    prompt = tuple((7 * number + 3 * i) % 250 for i in range(given or 3 * number + 4))
    wish = {"temperature": 0.0, "ignore_eos": True} | wish
    return Generate(str(number), prompt, SamplingParams(tokens, seed=number, **wish))


def _raise(loop: EngineLoop, plan: StepPlan, error: Exception, launched: float) -> Any:
    raise error


CHECKS = (
    Check("device path: decodes", decodes, FLOAT32),
    Check("device path: sampling parameters", sampling_parameters, FLOAT32, long=FLOAT32),
    Check("device path: one asks for more", one_asks_for_more, FLOAT32, long=FLOAT32),
    Check("device path: swaps", swaps, FLOAT32, long=FLOAT32),
    Check("device path: drafts", drafts, FLOAT32, long=FLOAT32),
    Check("device path: drafts ahead", drafts_ahead, FLOAT32, long=FLOAT32),
    Check("device path: draft models", draft_models, FLOAT32, long=FLOAT32),
    Check("device path: few bits", few_bits, FLOAT32, long=FLOAT32),
    Check("device path: lengths", lengths, FLOAT32, long=FLOAT32),
    Check("device path: adapters", adapters, FLOAT32, long=FLOAT32),
    Check("device path: experts", experts, FLOAT32, long=FLOAT32),
    Check("device path: latent vectors", latent_vectors, FLOAT32, long=FLOAT32),
    Check("device path: states", states, FLOAT32, long=FLOAT32),
    Check("device path: lengths of experts", lengths_of_experts, FLOAT32, long=FLOAT32),
)
