# The engine on real tiny models: token for token what transformers generates, however the work is batched, chunked,
# cached or preempted.

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_backend.step.messages import Abort, Embed, FinishReason, Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import Answer, answer_all, collect, expect_short_replies, finish, greedy, model_loop
from tests.support.tiny_model import TinyModel, write_shards, write_tiny_model

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 70, 131)
MAX_TOKENS = 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8}
GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": 20, "attn_logit_softcapping": 4.0}
GEMMA_3 = {"sliding_window_pattern": 2, "attn_logit_softcapping": None, "rope_local_base_freq": 100.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0], "long_factor": [4.0] * 6}
SOME_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": TinyModel(num_shards=3),
    "llama-one-kv-head-tied": TinyModel(num_kv_heads=1, tie_word_embeddings=True),
    "llama-bias-no-groups": TinyModel(num_kv_heads=4, attention_bias=True),
    "llama3-rope": TinyModel(extra={"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "linear-rope-v5": TinyModel(
        extra={"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "rope_theta": None}
    ),
    "qwen3": TinyModel("Qwen3ForCausalLM", head_dim=24),
    "yarn-rope": TinyModel(extra={"rope_scaling": YARN}),
    "yarn-rope-with-options": TinyModel(
        extra={"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16, "truncate": False}}
    ),
    "dynamic-rope": TinyModel(extra={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "qwen2": TinyModel("Qwen2ForCausalLM", num_shards=2),
    "qwen2-tied-yarn": TinyModel("Qwen2ForCausalLM", tie_word_embeddings=True, extra={"rope_scaling": YARN}),
    "qwen2-some-windows": TinyModel(
        "Qwen2ForCausalLM",
        num_layers=3,
        extra={"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "mistral": TinyModel("MistralForCausalLM", extra={"sliding_window": 20}),
    "mistral-short-window": TinyModel("MistralForCausalLM", num_kv_heads=1, extra={"sliding_window": 2}),
    "mistral-no-window": TinyModel("MistralForCausalLM", extra={"sliding_window": None}),
    "phi3": TinyModel("Phi3ForCausalLM", extra={"sliding_window": 20}),
    "granite-tied": TinyModel("GraniteForCausalLM", tie_word_embeddings=True, extra=GRANITE),
    "gemma2": TinyModel("Gemma2ForCausalLM", num_kv_heads=1, tie_word_embeddings=True, extra=GEMMA),
    "gemma3": TinyModel("Gemma3ForCausalLM", num_layers=3, tie_word_embeddings=True, extra=GEMMA | GEMMA_3),
    "phi3-longrope": TinyModel("Phi3ForCausalLM", extra={"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}),
    "glm4": TinyModel("Glm4ForCausalLM", attention_bias=True, head_dim=24),
    "ministral": TinyModel("MinistralForCausalLM", extra=SOME_WINDOWS),
    "ministral3": TinyModel("Ministral3ForCausalLM", extra={"rope_scaling": YARN | {"llama_4_scaling_beta": 0.5}}),
    "olmo2": TinyModel("Olmo2ForCausalLM", extra={"rms_norm_eps": 1e-6}),
    "olmo3": TinyModel("Olmo3ForCausalLM", num_kv_heads=4, extra=SOME_WINDOWS),
    "smollm3": TinyModel("SmolLM3ForCausalLM", num_layers=3, extra={"no_rope_layer_interval": 2}),
    "llama4": TinyModel(
        "Llama4ForCausalLM",
        num_layers=4,
        experts_per_token=1,
        extra={"attention_chunk_size": 20, "interleave_moe_layer_step": 2, "floor_scale": 16, "attn_scale": 0.3},
    ),
    "qwen3-one-kv-head-tied": TinyModel("Qwen3ForCausalLM", num_kv_heads=1, tie_word_embeddings=True, num_shards=2),
}

# Their caches and the places of their tokens are as in the models beside them: in a commit their logits say the rest
# (test_logits.py), in a soak their replies.
IN_SOAK = (
    *("llama-one-kv-head-tied", "llama-bias-no-groups", "llama3-rope", "linear-rope-v5", "yarn-rope"),
    *("yarn-rope-with-options", "qwen2", "qwen2-tied-yarn", "mistral-no-window", "phi3", "granite-tied", "ministral"),
    *("olmo2", "qwen3-one-kv-head-tied", "gemma2"),
)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Prompts around block and budget boundaries."""
    dice = random.Random(7)
    return [tuple(dice.randrange(256) for _ in range(length)) for length in LENGTHS]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] * (name in IN_SOAK)) for name in MODELS]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny checkpoint of each kind."""
    return write_tiny_model(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain tiny Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("llama"), MODELS["llama"])


def oracle(folder: Path) -> Any:
    """Load a checkpoint into transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def likeliest(model: Any, prompt: tuple[int, ...], reply: list[int]) -> list[int]:
    """Return transformers' likeliest token at each place of a reply: if they are the reply, ``generate`` says it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *reply[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_greedy_tokens_equal_transformers(checkpoint: Path, prompts: list[tuple[int, ...]]) -> None:
    """Alone or in a full batch, in one piece or in chunks, with the prefix cached or not, and preempted once."""
    model = oracle(checkpoint)
    alone = model_loop(checkpoint, max_num_batched_tokens=512)
    crowded = model_loop(checkpoint, max_num_batched_tokens=64, max_num_seqs=9, block_size=2, num_kv_blocks=198)
    expect_short_replies(crowded)
    together = answer_all(crowded, [greedy(str(i), prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)])
    expected = [together[str(i), 0].token_ids for i in range(len(prompts))]

    assert crowded.scheduler.running.num_preempted > 0
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert len(tokens) == MAX_TOKENS and tokens == likeliest(model, prompt, tokens)
    for prompt, tokens in list(zip(prompts, expected, strict=True))[::4]:
        assert answer_all(alone, [greedy("x", prompt, MAX_TOKENS)])["x", 0].token_ids == tokens
        again = answer_all(alone, [greedy("x", prompt, MAX_TOKENS)])["x", 0]
        assert again.token_ids == tokens
        assert again.events[0].cached_tokens == (len(prompt) - 1) // 16 * 16


def test_preempted_sequences_say_the_same(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """With a KV cache too small for all, sequences are computed again and still get their tokens."""
    roomy = model_loop(llama, max_num_seqs=9)
    cramped = model_loop(llama, max_num_seqs=9, max_num_batched_tokens=40, num_kv_blocks=13)
    expect_short_replies(cramped)
    commands = [greedy(str(i), prompt, 40) for i, prompt in enumerate(prompts)]

    expected, answers = answer_all(roomy, commands), answer_all(cramped, commands)

    assert cramped.scheduler.running.num_preempted > 0
    assert {k: a.token_ids for k, a in answers.items()} == {k: a.token_ids for k, a in expected.items()}


def test_seeded_reply_does_not_depend_on_its_company(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Noise is a function of seed, reply and position: alone, in a crowd and under preemption the reply is one."""
    sampling = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, top_k=50, min_p=0.01)
    commands = [Generate(str(i), prompt, replace(sampling, seed=1000 + i), n=2) for i, prompt in enumerate(prompts[:6])]
    alone: dict[tuple[str, int], Answer] = {}
    for command in commands:
        alone |= answer_all(model_loop(llama), [command])

    crowded = answer_all(model_loop(llama, max_num_batched_tokens=24, max_num_seqs=16, num_kv_blocks=20), commands)

    assert {k: a.token_ids for k, a in crowded.items()} == {k: a.token_ids for k, a in alone.items()}
    assert crowded["3", 0].token_ids != crowded["3", 1].token_ids


PENALISED = SamplingParams(
    max_tokens=40,
    temperature=0.0,
    presence_penalty=0.4,
    frequency_penalty=0.6,
    repetition_penalty=1.2,
    logit_bias=((5, 2.5), (77, -100.0)),
    min_tokens=9,
    stop_token_ids=frozenset(range(0, 250, 50)),
)


def test_penalised_tokens_equal_transformers(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Repetition penalty, bias and a least length: the tokens of ``generate`` with the same processors."""
    model = oracle(llama)
    sampling = SamplingParams(
        MAX_TOKENS, 0.0, repetition_penalty=1.3, logit_bias=((5, 3.0),), min_tokens=6, stop_token_ids=frozenset({9, 30})
    )
    answers = answer_all(model_loop(llama), [Generate(str(i), p, sampling) for i, p in enumerate(prompts)])

    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            repetition_penalty=1.3,
            sequence_bias=[[[5], 3.0]],
            min_new_tokens=6,
            eos_token_id=[9, 30],
            pad_token_id=0,
        )
        assert answers[str(index), 0].token_ids == out[0].tolist()[len(prompt) :]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.soak), 0.9])
def test_penalties_depend_on_the_tokens_so_far_alone(
    llama: Path, prompts: list[tuple[int, ...]], temperature: float
) -> None:
    """Alone, in a crowd, chunked, preempted and resumed, a penalised reply is one and the same."""
    sampling = replace(PENALISED, temperature=temperature)
    commands = [Generate(str(i), p, replace(sampling, seed=i)) for i, p in enumerate(prompts[1::2])]
    alone = {key: a for c in commands for key, a in answer_all(model_loop(llama), [c]).items()}
    cramped = model_loop(llama, max_num_seqs=9, max_num_batched_tokens=40, num_kv_blocks=13)
    expect_short_replies(cramped)

    crowded = answer_all(cramped, [*commands, *(greedy(f"other {i}", p, 40) for i, p in enumerate(prompts))])

    assert cramped.scheduler.running.num_preempted > 0
    for (name, index), answer in alone.items():
        assert crowded[name, index].token_ids == answer.token_ids
        assert len(answer.token_ids) > 9
        command = replace(commands[int(name)], resume_token_ids=tuple(answer.token_ids[:7]))
        assert answer_all(model_loop(llama), [command])[name, 0].token_ids == answer.token_ids[7:]
    assert alone["3", 0].token_ids != answer_all(model_loop(llama), [greedy("3", prompts[7], 30)])["3", 0].token_ids


def test_resumed_reply_continues_another_replicas(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """A sampled reply that is cut and continued elsewhere is the reply that was never cut."""
    command = Generate("x", prompts[5], SamplingParams(max_tokens=30, seed=5))
    whole = answer_all(model_loop(llama), [command])["x", 0].token_ids

    rest = answer_all(model_loop(llama), [replace(command, resume_token_ids=tuple(whole[:11]))])["x", 0]

    assert rest.token_ids == whole[11:]
    assert rest.finish_reason == FinishReason.LENGTH


def test_one_of_several_replies_is_resumed_alone(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """It keeps its number, and with it its noise."""
    command = Generate("x", prompts[5], SamplingParams(max_tokens=20, seed=5), n=3)
    whole = answer_all(model_loop(llama), [command])["x", 2].token_ids

    alone = replace(command, n=1, first_reply=2, resume_token_ids=tuple(whole[:6]))
    assert answer_all(model_loop(llama), [alone])["x", 2].token_ids == whole[6:]


def test_embedding_is_the_normalised_mean_of_the_hidden_states(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Chunked or not, an embedding equals the pooled final hidden states of transformers, and its blocks are free."""
    model = oracle(llama)
    loop = model_loop(llama, max_num_batched_tokens=24, max_num_seqs=4)

    answers = answer_all(loop, [greedy("g", prompts[6], 5), *(Embed(str(i), p) for i, p in enumerate(prompts))])

    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(hidden, dim=0)
        torch.testing.assert_close(torch.tensor(answers[str(index), 0].vector), expected, atol=1e-5, rtol=1e-4)


def test_logprobs_are_the_models_own(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Reported log-probabilities are those before temperature and filters, alternatives in falling order."""
    model = oracle(llama)
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_k=5, seed=3, logprobs=4)

    answer = answer_all(model_loop(llama), [Generate("x", prompts[4], sampling)])["x", 0]

    with torch.no_grad():
        logits: Tensor = model(torch.tensor([(*prompts[4], *answer.token_ids)])).logits[0]
    expected = logits.log_softmax(-1)[len(prompts[4]) - 1 :]
    for row, (token, event) in enumerate(zip(answer.token_ids, answer.events, strict=True)):
        (logprob,) = event.logprobs
        assert logprob is not None
        assert logprob.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)
        assert [id_ for id_, _ in logprob.top] == expected[row].topk(4).indices.tolist()


def test_prompt_logprobs_are_those_of_transformers(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Chunked, preempted, with its prefix cached or shared by two replies: each prompt token is scored once."""
    model = oracle(llama)
    scoring = SamplingParams(max_tokens=40, temperature=0.0, prompt_logprobs=3)
    commands = [Generate(f"s{i}", p, scoring, n=2) for i, p in enumerate(prompts)]
    loop = model_loop(llama, max_num_seqs=9, max_num_batched_tokens=24, num_kv_blocks=18, max_model_len=200)
    answer_all(loop, [greedy("before", prompts[8], 1), greedy("before, too", prompts[5], 1)])

    answers = answer_all(loop, [*commands, *(greedy(f"other {i}", p, 40) for i, p in enumerate(prompts))])

    assert loop.scheduler.running.num_preempted > 0
    for index, prompt in enumerate(prompts):
        first, *later = answers[f"s{index}", 0].events
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(first.prompt_scores) == len(prompt) - 1
        for row, score in enumerate(first.prompt_scores):
            assert score.logprob == pytest.approx(expected[row, prompt[row + 1]].item(), abs=1e-4)
            assert [token for token, _ in score.top] == expected[row].topk(3).indices.tolist()
        assert not any(event.prompt_scores for event in [*later, *answers[f"s{index}", 1].events])
        reply = answers[f"s{index}", 0].token_ids
        assert len(reply) == 40 and reply == likeliest(model, prompt, reply)


POISON = 250


@pytest.fixture(scope="module")
def poisonous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a token whose embedding is not a number, as a broken checkpoint or an overflow would make it."""
    folder = write_tiny_model(tmp_path_factory.mktemp("poisonous"), TinyModel())
    tensors = TinyModel().tensors()
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    write_shards(folder, tensors)
    return folder


def test_poison_request_fails_alone(llama: Path, poisonous: Path, prompts: list[tuple[int, ...]]) -> None:
    """A prompt whose logits are not finite gets an error; its neighbours and heirs of its blocks notice nothing."""
    clean = [tuple(token for token in prompt if token != POISON) for prompt in prompts[:7]]
    commands = [greedy(str(i), prompt, 12) for i, prompt in enumerate(clean)]
    expected = answer_all(model_loop(llama), commands)
    loop = model_loop(poisonous, max_num_batched_tokens=40, max_num_seqs=12, num_kv_blocks=16)
    poison = [greedy("p1", (*clean[5], POISON, *clean[5]), 12), greedy("p2", (POISON, 1), 12), Embed("p3", (1, POISON))]
    aborted = greedy("p4", (POISON, *clean[6] * 2), 12)

    answers = answer_all(loop, [*poison, *commands])
    loop.handle(aborted)
    loop.step()
    loop.handle(Abort("p4"))
    again = answer_all(loop, commands)

    for name in ("p1", "p2", "p3"):
        assert "not finite" in (answers[name, 0].error or "")
    for key, answer in expected.items():
        assert answers[key].token_ids == answer.token_ids
        assert again[key].token_ids == answer.token_ids


def test_prefix_of_a_poison_prompt_stays_clean(llama: Path, poisonous: Path) -> None:
    """Who shares a clean beginning with a poison prompt that is still being computed does not share its fate."""
    beginning = tuple(range(33))
    command = greedy("clean", (*beginning, 3, 4, 5), 12)
    expected = answer_all(model_loop(llama), [command])["clean", 0].token_ids
    loop = model_loop(poisonous, max_num_batched_tokens=40, max_num_seqs=4)
    answers: dict[tuple[str, int], Answer] = {}

    loop.handle(greedy("poison", (*beginning, POISON, *beginning, *beginning), 12))
    collect(answers, loop.step())
    loop.handle(command)
    finish(loop, answers)

    assert answers["clean", 0].token_ids == expected
    assert answers["poison", 0].finish_reason == FinishReason.ERROR


def test_leftovers_in_blocks_are_never_seen(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """Whatever an earlier user left in a block, even what is not a number, changes nothing."""
    commands = [greedy(str(i), prompt, 20) for i, prompt in enumerate(prompts)]
    expected = answer_all(model_loop(llama), commands)
    loop = model_loop(llama, max_num_batched_tokens=24, max_num_seqs=9)
    with torch.inference_mode():
        loop.runner.kv_cache[:, :-1] = float("nan")  # type: ignore[attr-defined]

    answers = answer_all(loop, commands)

    assert {k: a.token_ids for k, a in answers.items()} == {k: a.token_ids for k, a in expected.items()}


def test_eos_ends_a_reply_unless_it_is_ignored(tmp_path: Path, prompts: list[tuple[int, ...]], llama: Path) -> None:
    """The checkpoint's end-of-sequence token stops a reply with ``stop``; ``ignore_eos`` goes past it."""
    whole = answer_all(model_loop(llama), [greedy("x", prompts[3])])["x", 0].token_ids
    folder = write_tiny_model(tmp_path, replace(MODELS["llama"], eos_token_id=whole[4]))
    ignoring = Generate("y", prompts[3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))

    answers = answer_all(model_loop(folder), [greedy("x", prompts[3]), ignoring])

    assert answers["x", 0].token_ids == whole[: whole.index(whole[4]) + 1]
    assert answers["x", 0].finish_reason == FinishReason.STOP
    assert answers["y", 0].token_ids == whole


def test_dummy_weights_run_without_a_checkpoint(tmp_path: Path) -> None:
    """``load_format`` dummy needs config.json alone, and is the same every time."""
    write_tiny_model(tmp_path, TinyModel("Qwen3ForCausalLM"))
    (tmp_path / "model.safetensors").unlink()

    first, second = (
        answer_all(model_loop(tmp_path, load_format="dummy"), [greedy("x", (1, 2, 3))])["x", 0] for _ in range(2)
    )

    assert len(first.token_ids) == 20
    assert first.token_ids == second.token_ids


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars out of the test log."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_abort_frees_blocks_on_a_real_model(llama: Path, prompts: list[tuple[int, ...]]) -> None:
    """A reply that is aborted mid-stream leaves its blocks to the next step's sequences."""
    loop = model_loop(llama, max_num_seqs=4, num_kv_blocks=10)
    answers: dict[tuple[str, int], Answer] = {}
    loop.handle(greedy("leaves", prompts[8], 20))
    loop.handle(greedy("waits", prompts[7], 20))
    for _ in range(3):
        collect(answers, loop.step())
    assert ("waits", 0) not in answers

    collect(answers, loop.handle(Abort("leaves")))
    collect(answers, loop.step())

    assert len(answers["waits", 0].token_ids) == 1
    finish(loop, answers)
