# Structured output from real tiny models: whatever the weights say, the text follows the grammar, and the reply is the
# same however the work is batched, preempted or continued.

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.step.grammar import Constraint, GrammarCompiler, begin_masks, is_available
from gpu_backend.step.messages import Abort, Drain, Drained, FinishReason, Generate
from gpu_backend.step.sampling_params import Grammar, GrammarKind, SamplingParams
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
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.traces import DATA

pytestmark = pytest.mark.skipif(not is_available(), reason="llguidance is not installed")

END = 256  # of the tiny tokenizer
SUITE = DATA / "structured" / "json-schema-test-suite.tar.xz"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["toll", "gate"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WARM = SamplingParams(max_tokens=200, temperature=1.0, grammar=JSON)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), TinyModel(), with_tokenizer=True)


@pytest.fixture(scope="module")
def codec(llama: Path) -> TextCodec:
    return TextCodec.load(llama)


def is_right(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "sizes"]
        and len(value["name"]) <= 8
        and value["kind"] in ("toll", "gate")
        and len(value["sizes"]) <= 3
        and all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])
    )


def requests() -> list[Generate]:
    return [Generate(str(i), tuple(range(5 * i + 1)), replace(WARM, seed=i), n=2) for i in range(6)]


def test_replies_follow_the_schema_and_end_with_it(llama: Path, codec: TextCodec) -> None:
    """Random weights at temperature 1 write what the schema says, and stop when it is complete."""
    answers = answer_all(model_loop(llama, max_num_seqs=16), [*requests(), greedy("free", range(40))])

    structured = [answer for (name, _), answer in answers.items() if name != "free"]
    assert len(structured) == 12
    assert all(is_right(codec.decode(answer.token_ids)) for answer in structured)
    assert {answer.finish_reason for answer in structured} == {FinishReason.STOP}
    assert len({tuple(answer.token_ids) for answer in structured}) > 6
    free = answer_all(model_loop(llama), [greedy("free", range(40))])
    assert answers["free", 0].token_ids == free["free", 0].token_ids


def test_a_structured_reply_depends_on_its_own_tokens_alone(llama: Path) -> None:
    """Alone, in a crowd, chunked, preempted and resumed after any token: one and the same reply."""
    commands = requests()
    alone = {key: a for c in commands for key, a in answer_all(model_loop(llama), [c]).items()}
    cramped = model_loop(llama, max_num_seqs=9, max_num_batched_tokens=40, num_kv_blocks=13, max_model_len=200)
    expect_short_replies(cramped)

    crowded = answer_all(cramped, commands)

    assert cramped.scheduler.running.num_preempted > 0
    assert {k: a.token_ids for k, a in crowded.items()} == {k: a.token_ids for k, a in alone.items()}
    whole = alone["2", 0].token_ids
    one = replace(commands[2], n=1)
    for cut in (1, 9, len(whole) - 1, len(whole)):
        rest = answer_all(model_loop(llama), [replace(one, resume_token_ids=tuple(whole[:cut]))])["2", 0]
        assert (rest.token_ids, rest.finish_reason) == (whole[cut:], FinishReason.STOP)


def test_structure_goes_with_logprobs_and_penalties(llama: Path, codec: TextCodec) -> None:
    """Scores are the model's own, before the grammar had its word; penalties and biases move only what it allows."""
    sampling = replace(
        WARM, seed=3, logprobs=2, frequency_penalty=1.0, repetition_penalty=1.2, min_tokens=150, logit_bias=((7, 90.0),)
    )

    answer = answer_all(model_loop(llama), [Generate("x", (1, 2, 3), sampling)])["x", 0]

    assert is_right(codec.decode(answer.token_ids))
    first = answer.events[0].logprobs[0]
    assert first is not None and first.logprob <= first.top[0][1]
    assert first.top[0][0] != answer.token_ids[0]  # the model wanted something else


def test_a_bad_grammar_fails_alone(llama: Path) -> None:
    """Every reply of its request is told why; requests beside it, also with grammars, notice nothing."""
    bad = replace(WARM, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'))
    off = Generate("off", (1, 2), WARM, resume_token_ids=(1, 2, 3))
    expected = answer_all(model_loop(llama), [requests()[1]])

    answers = answer_all(model_loop(llama), [Generate("bad", (1, 2), bad, n=2), off, requests()[1], greedy("x", (5,))])

    assert "nonsense" in (answers["bad", 0].error or "") and "nonsense" in (answers["bad", 1].error or "")
    assert "resumed" in (answers["off", 0].error or "")
    assert all(answers[key].events[0].is_bad_grammar for key in (("bad", 0), ("bad", 1), ("off", 0)))
    assert answers["1", 0].token_ids == expected["1", 0].token_ids
    assert len(answers["x", 0].token_ids) == 20


def test_only_its_own_request_waits_for_a_grammar(llama: Path) -> None:
    """While one is compiled, steps go on, it can be aborted, its id is taken, and a drain waits for it."""
    loop = model_loop(llama)
    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, loop.handle(greedy("x", (5,))))
    collect(answers, loop.step())
    for name in ("gone", "kept"):
        assert loop.handle(Generate(name, (1, 2), WARM, n=2)) == []
    assert loop.handle(Generate("kept", (1, 2), WARM))[0].error is not None  # type: ignore[union-attr]

    collect(answers, loop.handle(Abort("gone", 1)))
    collect(answers, loop.handle(Abort("gone")))
    assert Drained() not in loop.handle(Drain())
    finish(loop, answers)

    assert [answers["gone", i].finish_reason for i in (0, 1)] == [FinishReason.ABORT] * 2
    assert [answers["kept", i].finish_reason for i in (0, 1)] == [FinishReason.STOP] * 2


@pytest.mark.parametrize(
    ("overlaps", "fails_at"),
    [
        *((False, "logits"), (True, "hidden_states")),
        *(pytest.param(*rest, marks=pytest.mark.soak) for rest in ((False, "hidden_states"), (True, "logits"))),
    ],
)
def test_a_step_that_fails_while_its_masks_are_made_costs_its_own_replies_alone(
    llama: Path, overlaps: bool, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads those masks; a request that follows the same grammar, and comes next, is served as if alone."""
    unlucky, *others = requests()[:3]
    expected = answer_all(model_loop(llama), [unlucky, *others])
    loop = model_loop(llama, async_scheduling=overlaps)
    waiting, begin = loop._grammars._compiler.compile(JSON).result(), Event()  # type: ignore[union-attr]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, loop.handle(unlucky))
    with monkeypatch.context() as patched:
        patched.setattr(type(loop.runner._model), fails_at, fail)  # type: ignore[attr-defined]
        waiting.rules.maker._beside.submit(begin.wait)
        collect(answers, loop.step())
    for command in others:
        collect(answers, loop.handle(command))
    begin.set()
    finish(loop, answers)

    assert "out of memory" in (answers.pop(("0", 0)).error or "")
    del expected["0", 0]
    assert {key: a.token_ids for key, a in answers.items()} == {key: a.token_ids for key, a in expected.items()}


def test_an_engine_without_a_compiler_refuses_grammars_alone() -> None:
    """The bare engine core serves the rest."""
    loop, _ = counting_loop(64)

    answers = answer_all(loop, [Generate("x", (1, 2), WARM), greedy("y", (3, 4))])

    assert "tokenizer" in (answers["x", 0].error or "")
    assert len(answers["y", 0].token_ids) == 20


def test_choices_and_expressions(llama: Path, codec: TextCodec) -> None:
    """vLLM's guided choice and regex: the reply is one of the texts, or matches whole."""
    choice = Grammar(GrammarKind.CHOICE, '["red", "green", "blue"]')
    regex = Grammar(GrammarKind.REGEX, r"[A-Z][a-z]{2,5} \d{1,3}")
    commands = [
        Generate(f"{g.kind} {s}", (9, s), replace(WARM, grammar=g, seed=s)) for g in (choice, regex) for s in range(8)
    ]

    texts = {name: codec.decode(a.token_ids) for (name, _), a in answer_all(model_loop(llama), commands).items()}

    assert {text for name, text in texts.items() if name.startswith("choice")} <= {"red", "green", "blue"}
    assert len(set(texts.values())) > 5
    for name, text in texts.items():
        assert name.startswith("choice") or re.fullmatch(r"[A-Z][a-z]{2,5} \d{1,3}", text)


def suite() -> Iterator[tuple[str, str, str, bool]]:
    """The public suite's tests of draft 2020-12: name, schema, instance, and whether it is valid."""
    with tarfile.open(SUITE) as archive:
        for member in archive.getmembers():
            folder, _, file_name = member.name.rpartition("/")
            if folder.endswith("/tests/draft2020-12") and (file := archive.extractfile(member)) is not None:
                for group in json.load(file):
                    for test in group["tests"]:
                        name = f"{file_name}: {group['description']}, {test['description']}"
                        yield name, json.dumps(group["schema"]), json.dumps(test["data"]), test["valid"]


def can_end(constraint: Constraint) -> bool:
    """Whether nothing is missing."""
    begun = begin_masks([constraint], 260)
    assert begun is not None
    masks = begun.result()  # until then the constraint is the mask maker's
    return constraint.is_complete or bool(masks[0, END // 32] >> END % 32 & 1)


@pytest.mark.skipif(not SUITE.exists(), reason=f"SKIPPED: {SUITE.name} is not here; set TOLLGATE_DATA")
def test_no_invalid_instance_of_the_public_suite_can_be_written(llama: Path, codec: TextCodec) -> None:
    """Each schema is refused with a reason, or none of its invalid instances comes through its masks."""
    compiler = GrammarCompiler(llama, 260, frozenset({END}))
    invalid_ones, valid_ones = [], 0
    for name, schema, instance, is_valid in suite():
        compiled = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, schema))
        if compiled.exception() is not None:
            continue
        constraint = compiled.result().copy()
        tokens = codec.encode(instance, 10_000, add_special_tokens=False)
        comes_through = constraint.accept(tokens) is None and can_end(constraint)
        valid_ones += comes_through and is_valid
        if comes_through and not is_valid:
            invalid_ones.append(name)

    assert invalid_ones == []
    assert valid_ones > 300
