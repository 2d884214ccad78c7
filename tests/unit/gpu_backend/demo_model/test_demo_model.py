# The demo model's files keep their promises before anything is loaded: size, tokenizer, chat template, lessons.

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gpu_backend.demo_model import CHECKPOINT
from tools.demo_training.conversations import Composer
from tools.demo_training.evaluate import figures_table
from tools.demo_training.lessons import Lesson, fill_slots, read_lessons, read_slots
from tools.demo_training.phrasing import read_wordings, vary
from tools.demo_training.tokenizer import SPECIAL_TOKENS

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
LESSONS = read_lessons()
SHORT_ANSWERS = {"say-hello", "say-ok", "say-yes", "say-no", "ping"}  # they say just what was asked for


def render(messages: list[dict], add_generation_prompt: bool = True) -> str:
    """The chat template's text, rendered as inference servers do."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt, bos_token="<|bos|>")


def test_checkpoint_is_at_most_eight_mebibytes() -> None:
    """The whole checkpoint, weights and tokenizer, is small enough to be committed: 8 MiB."""
    size = sum(path.stat().st_size for path in CHECKPOINT.iterdir())

    assert size <= 8 * 2**20


def test_model_card_states_the_measured_figures() -> None:
    """The card's table is the one the training script measured for this checkpoint."""
    metrics = json.loads((CHECKPOINT.parent / "metrics.json").read_text(encoding="utf-8"))

    assert figures_table(metrics) in (CHECKPOINT.parent / "README.md").read_text(encoding="utf-8")


@settings(max_examples=120, deadline=None)
@given(st.text())
def test_tokenizer_keeps_any_text(text: str) -> None:
    """Whatever text goes in comes out again, character by character."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids

    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids() -> None:
    """Each mark of the chat template is one token, so text around it cannot merge into it."""
    ids = [TOKENIZER.encode(token, add_special_tokens=False).ids for token in SPECIAL_TOKENS]

    assert ids == [[number] for number in range(len(SPECIAL_TOKENS))]


def test_model_ends_with_the_end_token() -> None:
    """The token that closes a turn is the one at which generation stops."""
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text(encoding="utf-8"))

    assert generation["eos_token_id"] == TOKENIZER.token_to_id("<|end|>")


def test_chat_template_marks_every_turn() -> None:
    """System, user and assistant turns stand between their mark and the end mark, and the assistant is to speak."""
    text = render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "What is a hold?"},
        ]
    )

    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|>"
        "<|assistant|>Hello!<|end|><|user|>What is a hold?<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}], "Hello you"),
        (None, ""),
        ("  Hi \n", "Hi"),
    ],
)
def test_chat_template_takes_every_form_of_content(content: object, shown: str) -> None:
    """Content may be a string, a list of parts or null, as the chat protocol allows."""
    text = render([{"role": "user", "content": content}], add_generation_prompt=False)

    assert text == f"<|bos|><|user|>{shown}<|end|>"


def test_no_question_is_asked_twice() -> None:
    """One question has one answer: no phrasing stands in two places, and no held-out one is trained on."""
    asked = Counter(q.lower().rstrip("?.! ") for lesson in LESSONS for q in (*lesson.questions, *lesson.held_out))

    assert [question for question, times in asked.items() if times > 1] == []


def test_lessons_have_names_of_their_own() -> None:
    """A lesson is known by its id."""
    ids = [lesson.id for lesson in LESSONS]

    assert len(ids) == len(set(ids))


def test_every_lesson_is_asked_in_several_ways() -> None:
    """A lesson has at least three phrasings to learn from and one that is held out."""
    thin = [lesson.id for lesson in LESSONS if len(lesson.questions) < 3 or not lesson.held_out]

    assert thin == []


def test_every_answer_is_a_whole_sentence() -> None:
    """An answer ends as a sentence does and has at least three words, but for those that say what was asked for."""
    broken = [
        lesson.id
        for lesson in LESSONS
        if lesson.id not in SHORT_ANSWERS and not re.search(r"\S+ \S+ .*\S[.!?]$", lesson.answer, re.DOTALL)
    ]

    assert broken == []


def test_every_slot_has_words() -> None:
    """Each {slot} of a question can be filled."""
    slots, rng = read_slots(), random.Random(0)

    filled = [fill_slots(q, slots, rng) for lesson in LESSONS for q in lesson.questions if "{" in q]

    assert filled
    assert not any("{" in question for question in filled)


def test_equal_seeds_vary_alike() -> None:
    """Training can be repeated: a question's variants depend on the dice alone."""
    words = read_wordings()

    first, second = ([vary("How do I get a key?", words, random.Random(s)) for s in range(50)] for _ in range(2))

    assert first == second
    assert len(set(first)) > 25


def test_held_out_phrasings_are_never_drawn() -> None:
    """What measures understanding is not trained on, not even where varying another phrasing arrives at it."""
    lesson = Lesson("a", "keys", "It is a secret.", ("What is a key?",), ("What's a key?",))
    composer = Composer([lesson], read_slots(), read_wordings(), TOKENIZER, context=512, seed=3)

    texts = [TOKENIZER.decode(composer.draw().token_ids, skip_special_tokens=False).lower() for _ in range(400)]

    assert not any(re.search(r"<\|user\|>what's a key[?.! ]*<\|end\|>", text) for text in texts)


def test_only_the_assistants_words_are_learnt() -> None:
    """In a chat the model learns the answer and the end mark, not the question."""
    lesson = Lesson("a", "keys", "It is a secret.", ("What is a key?",), ())
    composer = Composer([lesson], read_slots(), read_wordings(), TOKENIZER, context=512, seed=3)

    for example in (composer.draw() for _ in range(200)):
        learnt = [t for t, learns in zip(example.token_ids, example.learns, strict=True) if learns]
        said = TOKENIZER.decode(learnt, skip_special_tokens=False).split("<|end|>")
        assert all("It is a secret.".startswith(part) for part in said)
