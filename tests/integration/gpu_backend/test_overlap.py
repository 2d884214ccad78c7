# A real tiny model, a step launched before the last one's tokens are known: reply for reply what it says step by step,
# whatever a request asks for.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_backend.step.grammar import is_available
from gpu_backend.step.messages import Embed, Generate
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.support.engine import answer_all, expect_short_replies, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

END = 256  # of the tiny tokenizer
PLAIN = SamplingParams(max_tokens=24, temperature=1.0)
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["toll", "gate"]}, "size": {"type": "integer"}},
          "required": ["kind", "size"], "additionalProperties": False}  # fmt: skip
WISHES = {
    "greedy": replace(PLAIN, temperature=0.0),
    "sampled": PLAIN,
    "filtered": replace(PLAIN, top_p=0.8, top_k=30, min_p=0.01),
    "stops": replace(PLAIN, stop_token_ids=frozenset(range(40))),
    "stops late": replace(PLAIN, stop_token_ids=frozenset(range(40)), min_tokens=9),
    "logprobs": replace(PLAIN, logprobs=3, prompt_logprobs=1),
    "penalties": replace(PLAIN, temperature=0.0, presence_penalty=1.0, frequency_penalty=2.0, repetition_penalty=1.5),
    "bias": replace(PLAIN, logit_bias=((7, 5.0), (9, -5.0))),
    "grammar": replace(PLAIN, max_tokens=80, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_tiny_model(folder, TinyModel(eos_token_id=END), with_tokenizer=True)


def commands() -> list[Generate]:
    """Every wish twice, of different seeds, some with several replies, one continued."""
    names = [name for name in WISHES if name != "grammar" or is_available()]
    asked = [
        Generate(f"{name} {i}", tuple(range(3 * n, 3 * n + 11 * i + 5)), replace(WISHES[name], seed=n + i), n=i + 1)
        for n, name in enumerate(names)
        for i in range(2)
    ]
    return [*asked, Generate("resumed", (5, 6, 7), replace(PLAIN, seed=3), resume_token_ids=(8, 9))]


@pytest.mark.parametrize("num_kv_blocks", [200, 14])
def test_replies_equal_those_of_one_step_at_a_time(llama: Path, num_kv_blocks: int) -> None:
    """Sampling, stops, penalties, scores, grammars and preemption: tokens, scores and ends are the same."""
    everything = [*commands(), Embed("vector", tuple(range(70)))]
    answers = []
    for overlaps in (False, True):
        loop = model_loop(
            llama, max_num_seqs=9, max_num_batched_tokens=40, num_kv_blocks=num_kv_blocks, max_model_len=200,
            async_scheduling=overlaps,
        )  # fmt: skip
        expect_short_replies(loop)
        answers.append(answer_all(loop, everything))
        assert (loop.scheduler.running.num_preempted > 0) == (num_kv_blocks == 14)

    in_step, overlapped = answers
    assert overlapped.keys() == in_step.keys()
    for key, answer in overlapped.items():
        other = in_step[key]
        assert (answer.token_ids, answer.finish_reason, answer.error) == (
            other.token_ids, other.finish_reason, other.error), key  # fmt: skip
        assert answer.vector == pytest.approx(other.vector, abs=1e-5)
        for mine, theirs in zip(answer.events, other.events, strict=True):
            scores, others = ([score.logprob for score in event.logprobs if score] for event in (mine, theirs))
            assert scores == pytest.approx(others, abs=1e-4)
            assert len(mine.prompt_scores) == len(theirs.prompt_scores)
    stopped = [key for key, answer in overlapped.items() if answer.finish_reason == "stop"]
    assert len({name for name, _ in stopped}) >= 3
