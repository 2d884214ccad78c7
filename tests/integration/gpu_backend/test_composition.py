# Every pair of features of a request and of the engine, on a real tiny model: a reply in a busy engine is token for
# token what it is alone in a plain one, for each pair that composition.py does not declare apart. Each request asks
# for several features and each engine has several, so that few of them hold all pairs.

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.engine.requests import find_problem
from gpu_backend.execution.runner import Runner
from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.server.reply import ReplyWriter, join_replies
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.grammar import is_available
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Abort, FinishReason, Generate
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.support.composition import APART, ENGINE_FEATURES, EXACT
from tests.support.engine import Answer, collect, draft_from, expect_short_replies, model_loop
from tests.support.kv_transfer import end_leases, exchanging, prefill
from tests.support.tiny_heads import write_calm_model, write_eagle_head, write_mtp_model
from tests.support.tiny_model import TinyModel, write_tiny_model

Answers = dict[tuple[str, int], Answer]
END = 256
SCHEMA = '{"type":"object","properties":{"a":{"enum":["x","yy"]}},"required":["a"],"additionalProperties":false}'
TOOL_CALL = 'start: "<tool_call>" /[a-z]{3,9}/ "</tool_call>"'
# One way to ask for each feature of a request: fields of its sampling, and of the command.
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.05},
    "seed": {"seed": 2**63 - 5},
    "logit_bias": {"logit_bias": ((5, 2.5), (77, -100.0))},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": frozenset(range(0, 250, 3))},
    "max_tokens": {"max_tokens": 5},
    "stop_token_ids": {"stop_token_ids": frozenset(range(0, 250, 12))},
    "ignore_eos": {"ignore_eos": True, "logit_bias": ((END, 4.0),)},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "grammar": {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)},
    "tools": {"grammar": Grammar(GrammarKind.LARK, TOOL_CALL)},
}
COMMAND: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "tenant": {"tenant": "another"},
    "weight": {"weight": 3.0},
    "priority": {"priority": "low"},
    "tier": {"tier": "batch"},
    "deadline_ms": {"deadline_ms": 600_000},
    "holds_blocks": {"holds_blocks": True},
}
LATER = ("resume_token_ids", "stop", "abort")  # asked for when the reply alone is known
LATER += ("remote",)  # when another engine holds the prompt's blocks
FEATURES = [*SAMPLING, *COMMAND, *LATER]
AT_ONCE = 6  # features of one request; in a commit more of them in fewer requests
MORE_AT_ONCE = 9
SAMPLE = 10  # requests, which have every feature, of an engine that drafts by a head in a commit
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "draft": {"speculative_method": "draft", "num_speculative_tokens": 3},
    "overlap": {"async_scheduling": True},
}
HEADS: dict[str, dict[str, Any]] = {
    "mtp": {"speculative_method": "mtp", "num_speculative_tokens": 3},
    "eagle3": {"speculative_method": "eagle3", "num_speculative_tokens": 3},
}
ALWAYS = ("prefix cache", "host cache", "preemption", "chunks")  # what the busy engine meets
MORE = ("sliding window", "swap", "graphs")
EXCHANGE = "kv transfer"  # of all engines of one process
KINDS = ("experts", "sinks")  # of models, in engines of a model without windows
WAYS: tuple[tuple[str, ...], ...] = (("ngram", "overlap"), ("draft", "overlap"))
ENGINES: list[tuple[str, ...]] = [(method, *ALWAYS, *KINDS, EXCHANGE) for method in ("ngram", "draft")]
ENGINES += [("overlap", *ALWAYS, *KINDS, "graphs", EXCHANGE), *((*ways, *ALWAYS, *MORE, EXCHANGE) for ways in WAYS)]
ENGINES += [("ngram", "overlap", *ALWAYS, "latent", "graphs", EXCHANGE), ("draft", *ALWAYS, "latent", EXCHANGE)]
RANKS = ("tensor parallel", "pipeline parallel")
BY_EXPERT = "expert parallel"
ENGINES_OF_RANKS = [(*ways, *ALWAYS, *MORE, *RANKS) for ways in (*WAYS, ("overlap",))]  # of four processes each
ENGINES_OF_RANKS += [("overlap", *ALWAYS, *KINDS, *RANKS), ("overlap", *ALWAYS, "latent", *RANKS)]
ENGINES_OF_RANKS += [("overlap", *ALWAYS, *kinds, *RANKS, BY_EXPERT) for kinds in (KINDS, ("latent",))]
# Heads draft for models of their own, whose next token follows from the last one more than from those before.
OF_HEADS = ("overlap", *ALWAYS, "graphs", EXCHANGE)
ENGINES_OF_HEADS = [("mtp", "latent", *OF_HEADS), ("eagle3", *OF_HEADS)]
MORE_OF_HEADS = [("mtp", "latent", *ALWAYS, "swap", EXCHANGE), ("eagle3", *ALWAYS, "swap", EXCHANGE)]
MORE_OF_HEADS += [("mtp", "latent", "overlap", *ALWAYS, *RANKS), ("eagle3", "overlap", *ALWAYS, "tensor parallel")]
OF_STATES = ("overlap", "preemption", "chunks", "states")  # no prefix is found, and nothing goes to host memory
ENGINES_OF_STATES = [(*OF_STATES, "graphs")]
MORE_OF_HEADS += [(*OF_STATES, *RANKS, BY_EXPERT)]
SWEEP = [(engine, None) for engine in (*ENGINES_OF_HEADS, *ENGINES_OF_STATES, *MORE_OF_HEADS)]
ALL_KINDS = (*KINDS, "latent")
WITH_KINDS = [(feature, kind) for kind in ALL_KINDS for feature in (*FEATURES, *METHODS, *ALWAYS, "graphs", EXCHANGE)]
KINDS_OF_RANKS = [
    (feature, kind) for kind in (*ALL_KINDS, BY_EXPERT) for feature in (*FEATURES, "overlap", *ALWAYS, *RANKS)
]
KINDS_OF_RANKS += [(kind, BY_EXPERT) for kind in ALL_KINDS]
PLAIN: dict[str, Any] = {"prefix_caching": False, "max_num_seqs": 1, "block_size": 2, "max_model_len": 64}
BUSY: dict[str, Any] = PLAIN | {
    "prefix_caching": True,
    "max_num_seqs": 8,
    "host_kv_bytes": 2**20,
    "num_kv_blocks": 32,
    "max_num_batched_tokens": 16,
}
PREFILLS: dict[str, Any] = PLAIN | {"prefix_caching": True, "num_kv_blocks": 2048}
Faults = dict[tuple[tuple[str, ...], str], AssertionError | None]
FLAT = StepCost(fixed=1.0, weights=0.0, token=1e-6, context=0.0, pair=0.0)  # of a step: copies pay, and drafts

pytestmark = pytest.mark.skipif(not is_available(), reason="llguidance is not installed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # In one of its layers only, which has a rope of its own; and scores have a soft cap.
    windows = {"sliding_window": 10, "sliding_window_pattern": 2, "attn_logit_softcapping": 6.0}
    windowed = TinyModel("Gemma3ForCausalLM", extra=windows | {"query_pre_attn_scalar": 16}, eos_token_id=END)
    sinks = {"intermediate_size": 64, "num_experts": 6, "packs_experts": True, "extra": {"sliding_window": 10}}
    packed = TinyModel("GptOssForCausalLM", **sinks)
    grouped = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
    latent = TinyModel("DeepseekV3ForCausalLM", num_experts=8, extra=grouped, eos_token_id=END)
    kinds = {"": replace(packed, eos_token_id=END, attention_bias=True), "sliding window": windowed, "latent": latent}
    return {name: write_tiny_model(tmp_path_factory.mktemp("m"), kind, True) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models that heads draft for, an EAGLE-3 head, and a model that keeps states."""
    folder, llama = tmp_path_factory.mktemp("h"), TinyModel(num_layers=3, eos_token_id=END)
    states = TinyModel("Qwen3NextForCausalLM", num_layers=3, num_experts=6, eos_token_id=END)
    latent = TinyModel("DeepseekV3ForCausalLM", extra={"first_k_dense_replace": 1}, eos_token_id=END)
    return {
        "mtp": write_mtp_model(folder / "mtp", latent, agrees=True, with_tokenizer=True),
        "eagle3": write_calm_model(folder / "llama", llama),
        "head": write_eagle_head(folder / "head", llama, drafted=230, agrees=True),
        "states": write_tiny_model(folder / "states", states, True),
    }


def ask(*features: str) -> Generate:
    """Ask for the features, of a prompt that is theirs; some prompts begin alike."""
    sampling: dict[str, Any] = {"max_tokens": 40 if {"grammar", "tools"} & {*features} else 14}
    command: dict[str, Any] = {}
    for feature in features:
        both = {field: sampling[field] for field in SAMPLING.get(feature, {}) if field in sampling}
        sampling |= SAMPLING.get(feature, {})
        if "logit_bias" in both:
            sampling["logit_bias"] += both["logit_bias"]
        command |= COMMAND.get(feature, {})
    dice = random.Random("b " + ",".join(features))  # without the b, a draw is within 6e-6 of a tie; now 6e-3
    sampling.setdefault("seed", dice.randrange(2**40))
    prompt = (*range(100, 109), *(dice.randrange(250) for _ in range(dice.randrange(2, 12))))
    return Generate(",".join(features), prompt[dice.choice((0, 5)) :], SamplingParams(**sampling), **command)


def answer(loop: EngineLoop, asked: list[Generate]) -> Answers:
    """Answer all together; who wants to be aborted is, some steps later."""
    answers: Answers = {}
    for command in asked:
        collect(answers, loop.handle(command))
    steps = 0
    while loop.has_work():
        collect(answers, loop.step())
        loop.scheduler.check()
        steps += 1
        for command in asked if steps % 9 == 0 else ():
            if "abort" in command.request_id.split(","):
                collect(answers, loop.handle(Abort(command.request_id)))
    end_leases(loop)
    assert loop.blocks.num_in_use == 0
    return answers


def alone(folder: Path, asked: list[Generate]) -> Answers:
    """Answer each by itself, one reply after the other, in a plain engine."""
    loop, answers = model_loop(folder, **PLAIN), {}
    for command in asked:
        answers |= answer(loop, [replace(command, request_id=command.request_id.replace("abort", "stay"))])
    return {(key.replace("stay", "abort"), index): answer for (key, index), answer in answers.items()}


def resumed(asked: list[Generate], expected: Answers) -> list[Generate]:
    """Give those that are to be resumed their first tokens."""
    return [
        replace(command, resume_token_ids=tuple(expected[command.request_id, 0].token_ids[:-1][:3]))
        if "resume_token_ids" in command.request_id
        else command
        for command in asked
    ]


def check(command: Generate, answers: Answers, expected: Answers, codec: TextCodec) -> None:
    """Assert that a command's replies are those that it has alone."""
    known = len(command.resume_token_ids)
    for index in range(command.n):
        found, right = answers[command.request_id, index], expected[command.request_id, index]
        assert found.error is None
        if "abort" in command.request_id:
            assert found.token_ids == right.token_ids[known:][: len(found.token_ids)]
            continue
        assert (found.token_ids, found.finish_reason) == (right.token_ids[known:], right.finish_reason)
        assert scores(found) == pytest.approx(scores(right)[-len(scores(found)) :], abs=1e-4)
        if "stop" in command.request_id.split(","):
            stop = written(command, right, (), codec, "")[0][1:3]
            whole = written(command, right, (), codec, stop)
            assert written(command, found, command.resume_token_ids, codec, stop) == whole


def scores(answer: Answer) -> list[float]:
    """Return all log-probabilities that were reported with a reply's tokens."""
    reported = [score for event in answer.events for score in event.logprobs if score]
    return [value for score in reported for value in (score.logprob, *(v for _, v in score.top))]


def written(
    command: Generate, reply: Answer, resumed: tuple[int, ...], codec: TextCodec, stop: str
) -> tuple[str, Any, int]:
    """Return a reply as its client gets it: text, end and number of tokens."""
    stops = (stop,) if stop else ()
    writer = ReplyWriter(0, codec, command.sampling, stops, frozenset({END}), resumed)
    pieces = [writer.beginning, *(writer.write(event) for event in reply.events)]
    (piece,) = join_replies([piece for piece in pieces if piece], 1)
    return piece.text, piece.finish_reason, writer.num_tokens


def fault(command: Generate, answers: Answers, expected: Answers, codec: TextCodec) -> AssertionError | None:
    """Return what is wrong with a command's replies."""
    try:
        check(command, answers, expected, codec)
    except AssertionError as exc:
        return exc
    return None


def pairs(features: Iterable[str]) -> list[tuple[str, str]]:
    """Return all pairs that are not apart."""
    return [pair for pair in combinations(features, 2) if frozenset(pair) not in APART]


def rows(at_once: int) -> list[tuple[str, ...]]:
    """Return few sets of features that hold every pair: each takes what holds most pairs that are missing."""
    missing = {frozenset(pair) for pair in pairs(FEATURES)}
    found = []
    while missing:
        row: list[str] = min(map(sorted, missing))
        while len(row) < at_once:
            fitting = [f for f in FEATURES if f not in row and not any(frozenset((f, r)) in APART for r in row)]
            row.append(max(fitting, key=lambda f: sum(frozenset((f, r)) in missing for r in row)))
        missing -= {frozenset(pair) for pair in combinations(row, 2)}
        found.append(tuple(row))
    return found


def run(
    engine: tuple[str, ...], asked: list[Generate], expected: Answers, models: dict[str, Path]
) -> tuple[Answers, int]:
    """Answer all in a busy engine that has these features; return how many sequences were preempted, too."""
    method, kind = engine[0], kind_of(engine)
    methods = METHODS | HEADS
    ways = {name: value for way in methods if way in engine for name, value in methods[way].items()}
    drafting = {"draft": "latent" if kind == "latent" else "", "eagle3": "head"}
    draft = {"speculative_model": str(models[drafting[method]])} if method in drafting else {}
    swaps = {"copy_seconds": 0.0, "step_cost": FLAT, "step_stretch": 1e9} if "swap" in engine else {}
    ranks = {f"{how.replace(' ', '_')}_size": 2 for how in RANKS if how in engine}
    ranks |= {"enable_expert_parallel": BY_EXPERT in engine}
    own = {"cuda_graphs": "graphs" in engine} | ({} if "host cache" in engine else {"host_kv_bytes": 0})
    with contextlib.ExitStack() as stack:
        exchange = exchanging(stack) if EXCHANGE in engine else None
        loop = model_loop(models[kind], **BUSY | own, **ways, **draft, **swaps, **ranks, transfer=exchange)
        if EXCHANGE in engine:
            heads = {**ways, **draft} if method in HEADS else {}  # whose blocks hold what a head keeps, too
            prefiller = model_loop(models[kind], **PREFILLS, **heads, transfer=exchanging(stack))
            asked = [replace(c, remote=prefill(prefiller, c)) if "remote" in c.request_id else c for c in asked]
        answers = run_in(loop, method, asked, expected)
        if EXCHANGE in engine:
            assert loop.load().counters["kv_blocks_pulled"] > 0
            assert loop.load().counters["kv_blocks_offered"] > 0
    assert not own["cuda_graphs"] or (loop.runner.graphs is not None and loop.runner.graphs._graphs)
    assert loop.scheduler.running.num_swapped == (loop.scheduler.running.num_preempted if "swap" in engine else 0)
    assert (loop.scheduler.tables.prompt_tokens_found > 0) == ("prefix cache" in engine)
    assert (len(loop.blocks.host.resting) > 0) == ("host cache" in engine)
    assert loop.scheduler.speculator is None or loop.scheduler.speculator.num_held > 0
    return answers, loop.scheduler.running.num_preempted


def run_in(loop: EngineLoop, method: str, asked: list[Generate], expected: Answers) -> Answers:
    """Answer all in a loop whose drafts, if they are to come from the text, are the right ones or not."""
    assert isinstance(loop.runner, Runner)
    if method == "ngram":
        draft_from(loop, {key: reply.token_ids for key, reply in expected.items()}, 0.8)
    expect_short_replies(loop)
    try:
        return answer(loop, asked)
    finally:
        loop.runner.close()


def kind_of(engine: tuple[str, ...]) -> str:
    """Return which model an engine with these features has."""
    kinds = (kind for kind in ("sliding window", "latent", "states") if kind in engine)
    return engine[0] if engine[0] in HEADS else next(kinds, "")


@pytest.fixture(scope="module")
def faults(models: dict[str, Path]) -> Faults:
    return faults_in(ENGINES, models, at_once=MORE_AT_ONCE)


@pytest.fixture(scope="module")
def faults_of_ranks(models: dict[str, Path]) -> Faults:
    return faults_in(ENGINES_OF_RANKS, models)


def faults_in(
    engines: list[tuple[str, ...]], models: dict[str, Path], most: int | None = None, at_once: int = AT_ONCE
) -> Faults:
    """Return what is wrong with each request, or with so many, in each engine: most likely nothing."""
    faults: Faults = {}
    preempted: Counter[str] = Counter()  # by the engine's features
    for kind, folder in models.items():
        of_kind = [engine for engine in engines if kind_of(engine) == kind]
        if not of_kind:
            continue
        asked = [ask(*row) for row in rows(at_once)[:most]]
        expected = alone(folder, asked)
        asked = resumed(asked, expected)
        for engine in of_kind:
            answers, times = run(engine, asked, expected, models)
            preempted.update(dict.fromkeys(engine, times))
            ends = {reply.finish_reason for reply in answers.values()}
            assert ends == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
            for command in asked:
                faults[engine, command.request_id] = fault(command, answers, expected, TextCodec.load(folder))
    assert most is not None or all(preempted.values())
    return faults


def test_every_feature_is_here() -> None:
    """Whatever composition.py declares, of requests and of engines."""
    elsewhere = {"adapter", "pictures"}  # in test_lora.py and test_pictures.py
    assert {*FEATURES, "prefix cache", "preemption", *elsewhere} == EXACT.keys()
    of_engines = {*METHODS, *ALWAYS, *MORE, *ALL_KINDS, "states", EXCHANGE, *RANKS, BY_EXPERT, *HEADS}
    assert of_engines == ENGINE_FEATURES.keys()
    assert {feature for pair in APART for feature in pair} <= {*FEATURES, *of_engines}


@pytest.mark.parametrize(
    "pair", [*pairs([*FEATURES, *METHODS, *ALWAYS, *MORE, EXCHANGE]), *WITH_KINDS], ids=" and ".join
)
def test_a_pair_composes(pair: tuple[str, str], faults: Faults) -> None:
    """A request that asks for both, or for one in an engine that has the other, has the replies that it has alone."""
    expect_none(pair, faults)


@pytest.mark.soak
@pytest.mark.parametrize(
    "pair", [*pairs([*FEATURES, *METHODS, *ALWAYS, *MORE, *RANKS]), *KINDS_OF_RANKS], ids=" and ".join
)
def test_a_pair_composes_across_ranks(pair: tuple[str, str], faults_of_ranks: Faults) -> None:
    """The same where four processes compute: two halves of each layer, or of its experts, in two stages."""
    expect_none(pair, faults_of_ranks)


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        *((engine, SAMPLE) for engine in (*ENGINES_OF_HEADS, *ENGINES_OF_STATES)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in SWEEP),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else str(value),
)
def test_requests_compose_with_heads_and_states(
    engine: tuple[str, ...], most: int | None, headed: dict[str, Path]
) -> None:
    """Where MTP layers or an EAGLE-3 head draft, or layers keep states: all features of a request, or, in the sweep,
    all pairs of them."""
    faults = faults_in([engine], headed, most)

    assert {feature for _, row in faults for feature in row.split(",")} == {*FEATURES}
    assert not any(faults.values()), {where: fault for where, fault in faults.items() if fault}


def expect_none(pair: tuple[str, str], faults: Faults) -> None:
    shown = [fault for (engine, row), fault in faults.items() if {*pair} <= {*engine, *row.split(",")}]

    assert shown
    assert not any(shown), {where: fault for where, fault in faults.items() if fault}


def test_what_is_apart_is_refused(models: dict[str, Path]) -> None:
    """By the check of requests, the one field that both need, or the configuration."""
    limits = Limits(100, 260)
    problem = find_problem(replace(ask("n"), resume_token_ids=(1,)), limits)
    assert problem is not None
    assert "exactly 1 to resume" in problem
    assert SAMPLING["grammar"].keys() == SAMPLING["tools"].keys() == {"grammar"}
    with pytest.raises(ValueError, match="speculative_method"):
        engine_config("x", speculative_method="ngram", speculative_model="y")
    for rank in RANKS:
        with pytest.raises(ValueError, match="one process"):
            engine_config("x", kv_transfer_address="127.0.0.1:0", **{f"{rank.replace(' ', '_')}_size": 2})
