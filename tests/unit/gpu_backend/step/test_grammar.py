# Grammars as masks over tokens: what is let through, what is refused, and that copies do not disturb each other.

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_backend.server.checkpoint.checkpoint import Checkpoint
from gpu_backend.server.checkpoint.tool_calls import ToolStyle
from gpu_backend.server.requests.tools import read_tools
from gpu_backend.step.grammar import (
    MAX_EBNF,
    MAX_GRAMMAR_BYTES,
    BadGrammar,
    Constraint,
    GrammarCompiler,
    apply_masks,
    begin_masks,
)
from gpu_backend.step.sampling_params import Grammar, GrammarKind
from protocol.chat import ChatRequest, Function, Tool
from tests.support.front import END, token_ids, write_small_files

VOCAB = 260
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

MANY = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(240)},
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = write_small_files(tmp_path_factory.mktemp("tokenizer"))
    return GrammarCompiler(folder, VOCAB, frozenset({END}))


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def mask(constraint: Constraint) -> torch.Tensor:
    masks = begin_masks([None, constraint], VOCAB)
    assert masks is not None
    return masks.result()


def allowed(constraint: Constraint) -> set[int]:
    """The tokens that may come next."""
    logits = torch.zeros(2, VOCAB)
    apply_masks(logits, [1], mask(constraint))
    assert torch.equal(logits[0], torch.zeros(VOCAB))
    return {token for token, value in enumerate(logits[1].tolist()) if value == 0}


def follows(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the whole text, and its end after it, is let through by mask and by acceptance alike."""
    constraint = compiler.compile(grammar).result().copy()
    for token in token_ids(text):
        is_allowed = token in allowed(constraint)
        assert (constraint.accept((token,)) is None) == is_allowed
        if not is_allowed:
            return False
    return constraint.is_complete or END in allowed(constraint)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(PERSON), ['{"name": "Ann é 日", "age": 3}', '{"name":"","age":-1}'], ['{"age": 3}', "{}", "[", '{"x"']),
        (schema({"enum": ["a", "b", 3]}), ['"a"', "3"], ['"c"', "4"]),
        (schema({"type": "object"}), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        (Grammar(GrammarKind.REGEX, r"[a-c]{2}\d+"), ["ab1", "cc1234"], ["a1", "abc"]),
        (Grammar(GrammarKind.CHOICE, '["yes", "no \\"maybe\\"\\n", "日本"]'), ["yes", 'no "maybe"\n', "日本"], ["no"]),
        (Grammar(GrammarKind.CHOICE, json.dumps([f"{i}." for i in range(10_000)])), ["0.", "9999."], ["10000."]),
        (Grammar(GrammarKind.CHOICE, '["", "a", "ab"]'), ["", "a", "ab"], ["b", "abb"]),
        (Grammar(GrammarKind.LARK, 'start: "a"+ "b"?'), ["a", "aaab"], ["b", "abb"]),
        (
            Grammar(GrammarKind.EBNF, 'root ::= word "-" [0-9]{2}\nword ::= "x" | "y" word'),
            ["x-12", "yyx-12"],
            ["y-12"],
        ),
        (Grammar(GrammarKind.EBNF, r'root ::= "\u0041bc\u00e9\U0001F600" | "\\u0041"'), ["Abcé😀", r"\u0041"], ["䆼"]),
        (schema(MANY), ['{"p239": "x"}', '{"p0": "", "p1": "y"}'], ['{"p240": "x"}']),
    ],
)
def test_only_what_the_grammar_allows_comes_through(
    compiler: GrammarCompiler, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    """Each kind of grammar lets its own texts through, whole, and no other."""
    assert [text for text in good if not follows(compiler, grammar, text)] == []
    assert [text for text in bad if follows(compiler, grammar, text)] == []


@pytest.mark.parametrize("grammar", [schema({"type": "object"}), schema(PERSON)])
def test_json_has_no_run_of_blanks(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Compact, spaced and indented JSON comes through; two line breaks or two spaces in a row do not, anywhere."""
    value = {"name": "Ann", "age": 3}
    written = [json.dumps(value, separators=(",", ":")), *(json.dumps(value, indent=i) for i in (None, 2, 4, "\t"))]
    compact = written[0]
    gaps = [i + after for i, sign in enumerate(compact) for after in (0, 1) if sign in ":,"] + [1, len(compact) - 1]
    padded = [compact[:gap] + run + compact[gap:] for gap in gaps for run in ("\n\n", "  ", "\n" + " " * 17)]

    assert [text for text in written if not follows(compiler, grammar, text)] == []
    assert [text for text in padded if follows(compiler, grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "nonsense"}), "nonsense"),
        (schema({"$ref": "#/nowhere"}), "nowhere"),
        (schema({"not": {"type": "string"}}), "not"),
        (Grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around, including look-ahead and look-behind, is not supported"),
        (schema({"$ref": "#"}), "allows no text"),
        (schema({"anyOf": [{"$ref": "#"}]}), "allows no text"),
        (Grammar(GrammarKind.LARK, 'start: start "a" | start'), "allows no text"),
        (Grammar(GrammarKind.LARK, "start: nowhere"), "nowhere"),
        (Grammar(GrammarKind.LARK, "start"), ""),
        (Grammar(GrammarKind.EBNF, 'start ::= "a"'), "No 'root' rule found"),
        (Grammar(GrammarKind.EBNF, "root ::= " + "(" * 3000), "nested too deeply"),
        (Grammar(GrammarKind.EBNF, r'root ::= "\U00110000"'), ""),
        (Grammar(GrammarKind.EBNF, 'root ::= "' + "x" * MAX_EBNF + '"'), "characters"),
        (Grammar(GrammarKind.CHOICE, json.dumps(["x" * MAX_GRAMMAR_BYTES])), "bytes"),
    ],
)
def test_a_grammar_that_cannot_be_followed_says_why(compiler: GrammarCompiler, grammar: Grammar, reason: str) -> None:
    """The words are for the caller: one line that names what is wrong."""
    with pytest.raises(BadGrammar) as caught:
        compiler.compile(grammar).result()

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_costly_grammar_ends_itself(compiler: GrammarCompiler) -> None:
    """An expression whose states explode is stopped after some tokens: no request waits long for its masks."""
    constraint = compiler.compile(Grammar(GrammarKind.REGEX, "(.*a.{4000}x|.*b.{4000}y|.*c.{4000}z)")).result().copy()
    problems = []
    for token in token_ids("abcabccbabacacb" * 100):
        mask(constraint)
        problems.append(constraint.accept((token,)))

    assert any(problems)


def test_a_grammar_whose_masks_take_long_ends_itself(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step waits for them; then its replies end, and it cannot be asked for again. Its neighbours go on."""
    slow, other = schema({"type": "string", "maxLength": 7}), schema({"type": "string", "maxLength": 8})
    one, two, neighbour = (compiler.compile(grammar).result().copy() for grammar in (slow, slow, other))
    monkeypatch.setattr("gpu_backend.step.grammar.SLOW_BATCH", 0.0)
    for name in ("SLOW_MASK", "SLOW_FIRST_MASK"):
        monkeypatch.setattr(f"gpu_backend.step.grammar.{name}", 0.0)
    mask(one)

    assert "too long" in (one.accept(token_ids('"')) or "") and "too long" in (two.accept(token_ids('"')) or "")
    assert neighbour.accept(token_ids('"')) is None
    with pytest.raises(BadGrammar, match="take too long"):
        compiler.compile(schema({"type": "string", "maxLength": 9})).result()


def test_a_grammar_is_slow_once_its_tokens_are(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a moment ends no reply; tokens that take long one after the other do."""
    reply, ticks = compiler.compile(schema({"type": "string", "maxLength": 900})).result().copy(), iter(range(1000))
    monkeypatch.setattr("gpu_backend.step.grammar.time.thread_time", lambda: 0.01 * next(ticks))
    at_once = reply.accept(token_ids('"' + "a" * 100))

    assert at_once is None and reply.rules.owed == 0
    assert [reply.accept(token_ids("a")) is None for _ in range(5)] == [True, True, True, True, False]


def test_copies_advance_by_themselves(compiler: GrammarCompiler) -> None:
    """A grammar is compiled once; the replies that follow it do not disturb each other, nor the next request."""
    first = compiler.compile(schema(PERSON))
    one = first.result().copy()
    assert one.accept(token_ids('{"name": "A')) is None
    two = one.copy()
    assert two.accept(token_ids('", "age": 1}')) is None

    assert compiler.compile(schema(PERSON)) is first
    assert (one.is_complete, two.is_complete, first.result().is_complete) == (False, True, False)
    assert token_ids("{")[0] in allowed(first.result().copy())


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda reply: reply.accept(token_ids('{"name": "A", "age": 1}')), None),
        (lambda reply: reply.num_allowed(token_ids('{"nothing"')), 3),
        (lambda reply: reply.copy().accept(token_ids("{")), None),
        (lambda reply: reply.is_complete, False),
        (lambda reply: allowed(reply) == {token_ids("{")[0]}, True),
    ],
)
def test_who_asks_while_a_mask_is_made_waits_for_it(
    compiler: GrammarCompiler, ask: Callable[[Constraint], object], answer: object
) -> None:
    """The mask is of what the reply was when it was begun, and the answer is right, whatever became of the step."""
    reply = compiler.compile(schema(PERSON)).result().copy()
    begin = Event()
    reply.rules.maker._beside.submit(begin.wait)
    masks = begin_masks([reply], VOCAB)
    with ThreadPoolExecutor(1) as asking:
        try:
            asked = asking.submit(ask, reply)
            has_waited = not wait([asked], 0.02).done
        finally:
            begin.set()

    assert has_waited
    assert asked.result() == answer
    assert masks is not None and masks.result().tolist() == mask(compiler.compile(schema(PERSON)).result()).tolist()


def test_without_the_library_a_grammar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine serves everything else; it says what is missing."""
    monkeypatch.setattr("gpu_backend.step.grammar.is_available", lambda: False)
    compiler = GrammarCompiler(tmp_path, VOCAB, frozenset())

    with pytest.raises(BadGrammar, match="llguidance"):
        compiler.compile(schema({})).result()


def test_a_call_that_its_schema_bounds_ends_whatever_the_model_says(compiler: GrammarCompiler) -> None:
    """Blanks first, then letters and digits, as long as any may come: only what a schema leaves open has no end but
    ``max_tokens``."""
    size, unit = {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "string", "maxLength": 8}
    schema = {"properties": {"size": size, "unit": unit}, "additionalProperties": False}
    tool = Tool(Function("add", parameters=schema))
    asked = ChatRequest(model="tiny", messages=(), tools=(tool,), tool_choice="required", parallel_tool_calls=False)
    hermes = SimpleNamespace(tool_style=ToolStyle.HERMES)
    codec = SimpleNamespace(is_special=lambda token: False)
    use = read_tools(asked, cast(Checkpoint, SimpleNamespace(tool_chat=hermes, codec=codec)))
    assert use is not None and use.grammar is not None
    constraint, length = compiler.compile(use.grammar).result().copy(), 0
    worst = token_ids(" \n\tabc019")
    while not constraint.is_complete and length < 400:
        may = allowed(constraint) - {END}
        constraint.accept((next((token for token in worst if token in may), min(may)),))
        length += 1

    assert constraint.is_complete
