# Speculation on real tiny models: with drafts, right and wrong ones, every reply is token for token what it is without
# them, for each feature that composition.py declares exact.

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution import draft_model
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.sampling.sampler import Sampled, sample
from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.server.reply import ReplyWriter, join_replies
from gpu_backend.step.grammar import is_available
from gpu_backend.step.messages import Abort, Command, Embed, FinishReason, Generate
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.support.composition import EXACT, OFF
from tests.support.engine import Answer, answer_all, collect, draft_from, expect_short_replies, finish, model_loop
from tests.support.kv_transfer import decode, exchanging, prefill
from tests.support.tiny_model import TinyModel, write_shards, write_tiny_model

ON: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3}
PLAIN = SamplingParams(max_tokens=24, temperature=0.0)
WARM = SamplingParams(max_tokens=24, temperature=1.0)
# With bounds, so that random weights come to its end.
NUMBER = '{"type":"integer","minimum":0,"maximum":99}'
SCHEMA = f'{{"type":"object","properties":{{"a":{NUMBER},"b":{{"enum":["x","yy"]}}}},"required":["a","b"]}}'
TOOL_CALL = 'start: "<tool_call>" /[a-z]{3,9}/ "</tool_call>"'

# One way to ask for each feature; what is not here has a test of its own below.
ASKED: dict[str, SamplingParams] = {
    "temperature": replace(WARM, temperature=0.7),
    "top_p": replace(WARM, top_p=0.8),
    "top_k": replace(WARM, top_k=7),
    "min_p": replace(WARM, min_p=0.05),
    "seed": replace(WARM, seed=2**63 - 5),
    "logit_bias": replace(WARM, logit_bias=((5, 2.5), (77, -100.0))),
    "presence_penalty": replace(WARM, presence_penalty=0.8),
    "frequency_penalty": replace(PLAIN, frequency_penalty=0.9),
    "repetition_penalty": replace(PLAIN, repetition_penalty=1.3),
    "min_tokens": replace(WARM, min_tokens=9, stop_token_ids=frozenset(range(0, 250, 9))),
    "max_tokens": replace(PLAIN, max_tokens=5),
    "stop_token_ids": replace(WARM, stop_token_ids=frozenset(range(0, 250, 20))),
    "ignore_eos": replace(PLAIN, ignore_eos=True),
    "logprobs": replace(WARM, logprobs=3),
    "prompt_logprobs": replace(PLAIN, prompt_logprobs=2),
    "grammar": replace(WARM, max_tokens=90, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
    "tools": replace(WARM, max_tokens=60, grammar=Grammar(GrammarKind.LARK, TOOL_CALL)),
}
ALONE = {
    "adapter",  # in test_lora.py
    "pictures",  # in test_pictures.py
    "n",
    "resume_token_ids",
    "deadline_ms",
    "tenant",
    "weight",
    "priority",
    "tier",
    "prefix cache",
    "preemption",
    "abort",
    "stop",
    "remote",
    "holds_blocks",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), TinyModel(), with_tokenizer=True)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    dice = random.Random(11)
    return [tuple(dice.randrange(250) for _ in range(length)) for length in (1, 5, 16, 30, 47)]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with other weights than it has, but not by much: it agrees more often than not."""
    folder = write_tiny_model(tmp_path_factory.mktemp("draft"), TinyModel(), with_tokenizer=True)
    dice = torch.Generator().manual_seed(3)
    tensors = TinyModel().tensors()
    write_shards(folder, {n: t + 0.06 * t.std() * torch.randn(t.shape, generator=dice) for n, t in tensors.items()})
    return folder


def drafting(folder: Path) -> dict[str, Any]:
    """Return the settings of an engine whose drafts come from that model."""
    return {"speculative_method": "draft", "speculative_model": str(folder), "num_speculative_tokens": 3}


def tokens_of(answers: dict[tuple[str, int], Answer]) -> dict[tuple[str, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


def drafting_loop(
    folder: Path, replies: dict[tuple[str, int], list[int]], share: float = 0.8, **settings: Any
) -> EngineLoop:
    """Return a loop whose drafts are those replies, some tokens wrong."""
    loop = model_loop(folder, **ON, **settings)
    draft_from(loop, replies, share)
    return loop


def compare(
    folder: Path, commands: Iterable[Command], share: float = 0.8, **settings: Any
) -> dict[tuple[str, int], Answer]:
    """Answer without drafts and with them, and return the answers if they are the same."""
    commands = list(commands)
    expected = answer_all(model_loop(folder), commands)
    drafts = "speculative_method" in settings
    loop = model_loop(folder, **settings) if drafts else drafting_loop(folder, tokens_of(expected), share, **settings)
    answers = answer_all(loop, commands)
    assert loop.scheduler.speculator is not None
    assert loop.scheduler.speculator.num_held > 0
    assert share == 1.0 or loop.scheduler.speculator.num_held < loop.scheduler.speculator.num_draft_tokens
    for key, answer in answers.items():
        assert answer.token_ids == expected[key].token_ids, key
        assert answer.finish_reason == expected[key].finish_reason
        assert answer.error == expected[key].error
    return answers


def test_every_declared_feature_has_a_test() -> None:
    """The table says what composes; each line of it is shown here."""
    assert ASKED.keys() | ALONE == EXACT.keys()
    assert OFF.keys() == {"embeddings"}


@pytest.mark.parametrize(
    ("feature", "method"),
    [
        pytest.param(feature, method, marks=[pytest.mark.soak] * ((place + turn) % 2))
        for place, feature in enumerate(ASKED)
        for turn, method in enumerate(("text", "draft"))
    ],
)
def test_a_feature_composes(
    feature: str, method: str, llama: Path, draft: Path, prompts: list[tuple[int, ...]]
) -> None:
    """Tokens, ends and errors are the same with drafts and without, in one batch of several lengths."""
    sampling = ASKED[feature]
    if sampling.grammar is not None and not is_available():
        pytest.skip("llguidance is not installed")
    count = 2 if sampling.grammar is not None else 5
    commands = [
        Generate(str(i), prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts[:count])
    ]

    speculation = drafting(draft) if method == "draft" else {}
    answers = compare(llama, commands, max_num_batched_tokens=64, max_num_seqs=8, **speculation)

    if feature == "max_tokens":
        assert all(len(answer.token_ids) == 5 for answer in answers.values())
    if feature in ("stop_token_ids", "grammar", "tools"):
        assert FinishReason.STOP in {answer.finish_reason for answer in answers.values()}


def test_logprobs_are_those_without_drafts(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Of the tokens and of the prompt; drafts that failed report nothing."""
    sampling = replace(WARM, logprobs=3, prompt_logprobs=1)
    commands = [Generate("x", prompts[4], sampling), Generate("y", prompts[2], WARM)]
    expected = answer_all(model_loop(llama), commands)

    answers = answer_all(drafting_loop(llama, tokens_of(expected)), commands)

    def reported(answer: Answer) -> list[float]:
        scores = [score for event in answer.events for score in (*event.logprobs, *event.prompt_scores)]
        return [value for score in scores if score for value in (score.logprob, *(v for _, v in score.top))]

    assert reported(answers["x", 0]) == pytest.approx(reported(expected["x", 0]), abs=1e-4)
    assert len(reported(answers["x", 0])) == 24 * 4 + 46 * 2
    assert not reported(answers["y", 0])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_batches_tenants_tiers_and_replies_mix(llama: Path, prompts: list[tuple[int, ...]], share: float) -> None:
    """n replies of a prompt, tenants with weights, both tiers, a deadline, greedy beside sampled: each is its own."""
    commands = [
        Generate("n", prompts[3], replace(WARM, seed=3), n=3, tenant="a", weight=2.0),
        Generate("batch", prompts[4], WARM, tier="batch", tenant="b"),
        Generate("greedy", prompts[2], PLAIN, tenant="b", deadline_ms=60_000),
        Generate("one", prompts[0], replace(WARM, max_tokens=1)),
    ]
    expected = answer_all(model_loop(llama), commands)

    answers = answer_all(
        drafting_loop(llama, tokens_of(expected), share, max_num_batched_tokens=40, max_num_seqs=5), commands
    )

    assert tokens_of(answers) == tokens_of(expected)


def test_preempted_replies_say_the_same(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """With a KV cache too small for all, replies lose their blocks in between."""
    commands = [Generate(str(i), prompt, replace(WARM, max_tokens=40, seed=i)) for i, prompt in enumerate(prompts)]
    expected = answer_all(model_loop(llama), commands)
    loop = drafting_loop(llama, tokens_of(expected), 0.7, num_kv_blocks=9, max_num_batched_tokens=40, max_num_seqs=6)
    expect_short_replies(loop)

    answers = answer_all(loop, commands)

    assert loop.scheduler.running.num_preempted > 0
    assert tokens_of(answers) == tokens_of(expected)


def test_resumed_reply_goes_on_with_drafts(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Another replica's tokens, then drafts: the reply that was never cut; and the cache found its beginning."""
    command = Generate("x", prompts[4], replace(WARM, max_tokens=30, seed=5))
    whole = answer_all(model_loop(llama), [command])["x", 0].token_ids
    loop = drafting_loop(llama, {("x", 0): whole}, 0.8)

    first = answer_all(loop, [command])["x", 0]
    rest = answer_all(loop, [replace(command, resume_token_ids=tuple(whole[:11]))])["x", 0]

    assert first.token_ids == whole
    assert rest.token_ids == whole[11:]
    assert rest.events[0].cached_tokens == 47


def test_blocks_of_another_engine_compose(llama: Path, draft: Path, prompts: list[tuple[int, ...]]) -> None:
    """An engine that drafts holds blocks, and one that drafts goes on with them, with the very tokens of one alone."""
    commands = [Generate(str(i), prompt, replace(WARM, seed=i)) for i, prompt in enumerate(prompts)]
    expected = answer_all(model_loop(llama), commands)
    with contextlib.ExitStack() as stack:
        prefiller = drafting_loop(llama, tokens_of(expected), transfer=exchanging(stack))
        decoder = model_loop(llama, **drafting(draft), transfer=exchanging(stack))
        long = [command for command in commands if len(command.prompt_token_ids) > 16]
        asked = [replace(command, remote=prefill(prefiller, command)) for command in long]

        answers = decode(decoder, asked)

        assert decoder.load().counters["kv_blocks_pulled"] == sum((len(c.prompt_token_ids) - 1) // 16 for c in long) > 0
        assert decoder.scheduler.speculator is not None
        assert decoder.scheduler.speculator.num_held > 0
    assert tokens_of(answers).items() <= tokens_of(expected).items()


def test_draft_model_knows_what_the_model_knows(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """One that is the model itself drafts everything; its cache is the model's, as far as it is said to be filled."""
    commands = [Generate(str(i), p, replace(WARM, max_tokens=40, seed=i)) for i, p in enumerate((*prompts, *prompts))]
    expected = answer_all(model_loop(llama), commands)
    loop = model_loop(llama, num_kv_blocks=14, max_num_batched_tokens=40, max_num_seqs=8, **drafting(llama))
    expect_short_replies(loop)

    answers = answer_all(loop, commands)

    speculator, runner = loop.scheduler.speculator, loop.runner
    assert isinstance(runner, Runner)
    assert speculator is not None
    assert runner._draft_model is not None
    assert tokens_of(answers) == tokens_of(expected)
    assert loop.scheduler.running.num_preempted > 0
    assert speculator.num_held > 0.98 * speculator.num_draft_tokens > 50
    assert sum(loop.blocks.num_drafted) > 50
    for block, count in enumerate(loop.blocks.num_drafted):
        known, drafted = runner.kv_cache[:, block, :count], runner._draft_model.kv_cache[:, block, :count]
        torch.testing.assert_close(drafted, known, atol=1e-4, rtol=1e-4)


def test_draft_that_draws_with_the_same_noise_agrees_more_often(
    llama: Path, draft: Path, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a high temperature a draft's own dice agree by chance alone; common noise couples the two."""
    commands = [Generate(str(i), p, replace(WARM, temperature=2.0, seed=i)) for i, p in enumerate(prompts)]

    def sample_with_own_dice(logits: Tensor, steps: list[SequenceStep], last: Tensor) -> Sampled:
        return sample(logits, [replace(step, sampling=replace(step.sampling, seed=99)) for step in steps], last)

    shares = []
    for own_dice in (False, True):
        if own_dice:
            monkeypatch.setattr(draft_model, "sample", sample_with_own_dice)
        loop = model_loop(llama, **drafting(draft))
        answer_all(loop, commands)
        assert loop.scheduler.speculator is not None
        shares.append(loop.scheduler.speculator.num_held / loop.scheduler.speculator.num_draft_tokens)

    assert shares[0] > 1.5 * shares[1]


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path, llama: Path) -> None:
    """Its drafts would be other words; so is one that knows fewer positions."""
    other = write_tiny_model(tmp_path / "other", TinyModel(), with_tokenizer=True)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|user|>", "<|human|>"))
    short = write_tiny_model(tmp_path / "short", TinyModel(max_position=256), with_tokenizer=True)
    small = write_tiny_model(tmp_path / "small", TinyModel(vocab_size=259))

    with pytest.raises(UnsupportedModel, match="tokenizers"):
        model_loop(llama, **drafting(other))
    with pytest.raises(UnsupportedModel, match="knows only 256 positions"):
        model_loop(llama, **drafting(short))
    with pytest.raises(UnsupportedModel, match="has 259 tokens"):
        model_loop(llama, **drafting(small))


def test_aborted_reply_leaves_nothing_of_its_drafts(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Its blocks are another's in the next step, who says what it says alone."""
    commands = [Generate("leaves", prompts[4], WARM), Generate("waits", prompts[3], PLAIN)]
    expected = tokens_of(answer_all(model_loop(llama), commands))
    loop = drafting_loop(llama, expected, 0.5, num_kv_blocks=5, max_num_seqs=4)
    answers: dict[tuple[str, int], Answer] = {}
    for command in commands:
        collect(answers, loop.handle(command))
    for _ in range(4):
        collect(answers, loop.step())
    collect(answers, loop.handle(Abort("leaves")))

    finish(loop, answers)

    assert answers["waits", 0].token_ids == expected["waits", 0]
    assert answers["leaves", 0].token_ids == expected["leaves", 0][: len(answers["leaves", 0].token_ids)]


def test_stop_string_ends_the_text_inside_drafts(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Text and counted tokens are the same, whether the engine's tokens come one by one or several at once."""
    codec = TextCodec.load(llama)
    command = Generate("x", prompts[4], WARM)
    plain = answer_all(model_loop(llama), [command])["x", 0]
    drafted = answer_all(drafting_loop(llama, {("x", 0): plain.token_ids}, 1.0), [command])["x", 0]
    assert len(drafted.events) < len(plain.events)
    whole = ReplyWriter(0, codec, WARM)
    text = join_replies([piece for event in plain.events if (piece := whole.write(event))], 1)[0].text
    stop = text[10:12]

    def written(answer: Answer) -> tuple[str, tuple[int, ...], int]:
        writer = ReplyWriter(0, codec, WARM, (stop,))
        piece = join_replies([piece for event in answer.events if (piece := writer.write(event))], 1)[0]
        assert piece.finish_reason == FinishReason.STOP
        return piece.text, piece.token_ids, writer.num_tokens

    assert written(drafted) == written(plain)
    assert written(drafted)[0] == text[: text.index(stop)]


def test_repeating_reply_is_drafted_from_its_own_text(llama: Path) -> None:
    """Prompt lookup by itself: a prompt that makes the model go in circles takes fewer steps, with the same tokens."""
    command = Generate("x", (7, 7, 7, 7) * 8, replace(PLAIN, max_tokens=100, repetition_penalty=0.6))
    expected = answer_all(model_loop(llama), [command])["x", 0]
    loop = model_loop(llama, **ON)

    answer = answer_all(loop, [command, Embed("e", (1, 2, 3))])["x", 0]

    assert answer.token_ids == expected.token_ids
    assert len(answer.events) < 0.8 * len(expected.events)


def test_draft_that_is_no_number_harms_no_other(tmp_path: Path, llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """A draft may be a token that the model cannot compute; the reply goes on without drafts, and says the same."""
    commands = [Generate(str(i), prompt, PLAIN) for i, prompt in enumerate(prompts)]
    expected = tokens_of(answer_all(model_loop(llama), commands))
    poison = min(set(range(256)).difference(*prompts, *expected.values()))
    tensors = TinyModel().tensors()
    tensors["model.embed_tokens.weight"][poison] = float("nan")
    poisonous = write_tiny_model(tmp_path, TinyModel())
    write_shards(poisonous, tensors)
    loop = drafting_loop(poisonous, expected)
    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.draft_source = lambda sequence, count: (
        (poison,) * count
        if sequence.request.request_id == "3"
        else tuple(expected[sequence.request.request_id, 0][sequence.num_generated :][:count])
    )

    answers = answer_all(loop, commands)

    assert tokens_of(answers) == expected
    assert all(answer.error is None for answer in answers.values())
    with torch.inference_mode():
        assert torch.isfinite(loop.runner.kv_cache).all()  # type: ignore[attr-defined]
