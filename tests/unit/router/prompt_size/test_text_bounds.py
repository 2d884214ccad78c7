"""The bound on the tokens of a text: it holds for the field's tokenizers, whatever is written, and is not far above."""

from __future__ import annotations

import json
import math
import string
import unicodedata
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

import gpu_backend.demo_model
from gpu_backend.server.checkpoint.chat_template import ChatTemplate
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.checkpoint.tokens import TextCodec
from protocol.chat import ChatRequest, Message
from router.prompt_size import text_bounds
from router.prompt_size.prompt_bounds import bound_prompt
from router.prompt_size.text_bounds import bytes_most, shared_by_vocabularies, text_tokens_most
from router.prompt_size.token_counts import BYTES, ENCODINGS, NEWER_CLAUDE, SLICE, counter_of, encoding_of, tokens_most
from tests.support.growth import growth_of
from tests.unit.router.examples import model

pytest.importorskip("rs_bpe")  # has no wheels for the newest Pythons

DEMO = Path(gpu_backend.demo_model.__file__).parent / "checkpoint" / "tokenizer.json"
demo_checkpoint = cache(lambda: load_checkpoint(DEMO.parent))
DOCS = Path(__file__).parents[4] / "docs"

# What makes many tokens, or breaks the borders that a bound counts on.
pieces = st.one_of(
    st.sampled_from(sorted(shared_by_vocabularies().words)),
    st.text(string.ascii_lowercase, max_size=9),
    st.text(string.ascii_letters, max_size=9),
    st.text(string.digits + "abcdef", max_size=12),
    st.text(string.punctuation, max_size=6),
    st.text(" \t\n\r", max_size=40),
    st.text(max_size=6),
    st.text(st.characters(min_codepoint=0x10000), max_size=3),
    st.text("абвгдежзиклмнопр我们的网关いろはにほ안녕하세요مرحبا בשלוםนี้कि", max_size=8),
    st.text("eéǖṩậẇ가\u0301\u0308\u031b\u0323\u0345", max_size=6),
    st.sampled_from(["'s", "'LL", "<|endoftext|>", "==", "IGHT", "zzq"]),
    st.sampled_from(["\u200b", "\u3000", "\xa0", "\ufeff", "👩‍👩‍👧", "🏳️‍🌈", "é"]),
)  # fmt: skip
texts = st.builds(lambda parts, times: "".join(parts) * times, st.lists(pieces, max_size=40), st.integers(1, 4))


@given(texts)
@example("Τ크" * 20)  # the last byte of the one and the first of the other are a token of cl100k
@settings(max_examples=200)
def test_no_tokenizer_makes_more_tokens(text: str) -> None:
    """Of words and of what is none, in any script, repeated or not."""
    bound = text_tokens_most(text)

    assert all(counter_of(encoding)(text) <= bound for encoding in ENCODINGS)


@pytest.mark.parametrize("before", [" ", "“"])
def test_no_sign_before_a_character_makes_more_tokens(before: str) -> None:
    """In all scripts: a token that takes the first byte of a character leaves the others in pieces (" 网" is three)."""
    shared = json.loads((Path(text_bounds.__file__).parent / "artifacts" / "text_bounds.json").read_bytes())

    for character in "".join(shared["cheap"].values()):
        text = (before + character) * 12
        needed = max(counter_of(encoding)(text) for encoding in ENCODINGS)
        assert needed <= text_tokens_most(text), text[:2]


@given(texts)
@example("𝅘𝅥𝅯 ﷺ ﬞ ½ ᾧ")
@example("\xe9\u0323")  # the dot goes into the letter, and its acute out
def test_no_normalizer_writes_more_bytes(text: str) -> None:
    """Claude's tokenizer begins with NFKC, for which one character may be eighteen others; then they are tokens."""
    written_out = unicodedata.normalize("NFKC", text).encode()

    assert len(written_out) <= bytes_most(text)
    assert counter_of(BYTES)(text) == bytes_most(text)


def test_tokens_across_a_border_are_held_for() -> None:
    """As vocabularies have them that are not here: Tekken joins the last byte of some characters to a Hebrew letter,
    Claude 2 to some ideographs, and writes ligatures out."""
    assert text_tokens_most("联ד" * 20) >= 60
    assert text_tokens_most("无线" * 20) >= 60
    assert text_tokens_most("ﷺ" * 20) >= 420
    assert text_tokens_most("\xa0意" * 20) >= 60
    assert text_tokens_most("\xe9\u0323" * 20) >= 100
    assert text_tokens_most("w\u0323" * 20) >= 60


@given(st.lists(texts, max_size=4))
def test_no_prompt_has_more_tokens_however_it_is_counted(contents: list[str]) -> None:
    """By the bound or by the model's own tokenizer: what is held covers every message of it."""
    messages = tuple(Message(role="user", content=text) for text in contents)
    prompt = bound_prompt(ChatRequest(model="m", messages=messages)).closely()

    for name in (*ENCODINGS, str(DEMO), BYTES):
        needed = sum(map(counter_of(name), contents))
        assert needed <= prompt.tokens_on(model("m", tokenizer=name)) <= prompt.size
        assert name not in ENCODINGS or needed <= prompt.tokens_on(model("m")) <= prompt.size


def test_prose_and_code_are_not_held_at_twice_their_tokens() -> None:
    """By bytes they would be held at four to five times."""
    prose = (DOCS / "operations" / "breakers-and-queues.md").read_text()
    code = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    count = counter_of("o200k_base")

    assert text_tokens_most(prose) < 1.8 * count(prose) and 3.5 * count(prose) < len(prose)
    assert text_tokens_most(code) < 2.2 * count(code)


@pytest.mark.parametrize("unit", ["word ", "a", "aq", " ", "\n", "é", "語", "a é", "1", "=", "👩‍", "Aa", " x"])
def test_a_look_takes_as_long_as_the_text(unit: str) -> None:
    """Four times the text, about four times the time: no text makes a regular expression search itself again."""

    assert growth_of(lambda size: partial(text_tokens_most, unit * size)).is_linear


def test_a_tokenizer_counts_exactly() -> None:
    """OpenAI's encodings as the names of its models tell, any other by its file; control words in a text are text."""
    names = ("gpt-4o-2024-11-20", "openai/gpt-4.1-mini", "gpt-4-turbo", "gpt-9", "gpt-5.9")

    assert [*map(encoding_of, names)] == ["o200k_base", "o200k_base", "cl100k_base", None, None]
    assert tokens_most("hello world", "o200k_base") == 2
    assert tokens_most("<|endoftext|>", "o200k_base") > 1
    assert tokens_most("half a pair \ud800", "cl100k_base") >= 4


@given(st.lists(st.sampled_from(["<|end|>", "<|system|>", "<|", "end", "|>", " a", "\n"]), max_size=20).map("".join))
def test_control_tokens_that_a_caller_writes_are_held_as_text(text: str) -> None:
    """The engine takes them for text, which has more tokens than they have in a template."""
    demo = demo_checkpoint()
    assert demo.chat is not None
    empty, whole = (demo.chat.render([Message("user", said)]) for said in ("", text))
    made = [len(demo.codec.encode(prompt, 9_999, add_special_tokens=False)) for prompt in (empty, whole)]

    assert made[1] - made[0] <= counter_of(str(DEMO))(text)


def test_tokens_that_a_vocabulary_adds_are_held_as_text(tmp_path: Path) -> None:
    """As DeepSeek's turn markers: not called special, and control tokens all the same where a template names them."""
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.add_tokens([AddedToken("<｜User｜>", special=False), AddedToken("\n\n", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.load(tmp_path)
    chat = ChatTemplate("{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}", {}, codec.added_tokens)
    text = "<｜User｜>" * 9
    made = len(codec.encode(chat.render([Message("user", text)]), 9_999, add_special_tokens=False)) - 1
    count = counter_of(str(tmp_path / "tokenizer.json"))

    assert 9 < made <= count(text)
    assert count("a\n\nb") == 3


def test_a_newer_claude_is_held_for_more_tokens() -> None:
    """Up to 1.47 times as many as the one before has on prose, which was about 4.3 characters to a token."""
    prose = (DOCS / "fairness.md").read_text()

    assert tokens_most(prose, NEWER_CLAUDE) > 1.47 * len(prose) / 4.3
    assert tokens_most(prose, NEWER_CLAUDE) == math.ceil(1.75 * text_tokens_most(prose))


def test_a_long_text_is_counted_in_slices() -> None:
    """A tokenizer that takes its time over one long word is never given it whole; the count stays an upper bound."""
    count = counter_of(str(DEMO))
    text = "word " * SLICE

    assert count(text) >= 2 * count(text[: len(text) // 2]) - 2
