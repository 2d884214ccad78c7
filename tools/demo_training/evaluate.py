# How well the demo model answers: the share of questions whose greedy reply is the lesson's answer to the letter, ended
# by <|end|>. One forward pass tells: greedy decoding says the answer just when each of its tokens is the likeliest.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import nn

from tools.demo_training.conversations import render_question
from tools.demo_training.lessons import OFF_TOPIC, Lesson, fill_slots
from tools.demo_training.tokenizer import ASSISTANT, END, USER

_SYSTEM = "You are a careful assistant for the developers of our company."


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt and the reply it should get."""

    lesson_id: str
    prompt: str
    prompt_ids: list[int]
    reply_ids: list[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of a set of probes, 0 to 1."""

    count: int
    greedy: float  # answered with the right answer at temperature 0
    sampled: float  # expected share answered with it to the letter at temperature 1
    missed: tuple[str, ...]  # "lesson: question" of those that were not


def score_probes(model: nn.Module, probes: list[Probe], batch_size: int = 64) -> Score:
    """How many of ``probes`` the model answers right."""
    model.eval()
    missed, chances = [], []
    ordered = sorted(probes, key=lambda p: len(p.prompt_ids) + len(p.reply_ids))
    with torch.inference_mode():
        for start in range(0, len(ordered), batch_size):
            batch = ordered[start : start + batch_size]
            longest = max(len(p.prompt_ids) + len(p.reply_ids) for p in batch)
            rows = [p.prompt_ids + p.reply_ids + [0] * (longest - len(p.prompt_ids) - len(p.reply_ids)) for p in batch]
            logits = model(input_ids=torch.tensor(rows), use_cache=False).logits  # (batch, longest, vocabulary)
            for row, probe in enumerate(batch):
                first = len(probe.prompt_ids) - 1
                said = logits[row, first : first + len(probe.reply_ids)].log_softmax(-1)
                wanted = torch.tensor(probe.reply_ids)
                chances.append(said.gather(1, wanted[:, None]).sum().exp().item())
                if not bool((said.argmax(-1) == wanted).all()):
                    missed.append(f"{probe.lesson_id}: {probe.prompt}")
    return Score(len(probes), 1 - len(missed) / len(probes), sum(chances) / len(chances), tuple(missed))


def probe_sets(lessons: list[Lesson], slots: dict[str, list[str]], tokenizer: Tokenizer) -> dict[str, list[Probe]]:
    """The questions to measure: those trained on, those held out, and the held-out ones in other dress."""
    on_topic = [lesson for lesson in lessons if lesson.topic != OFF_TOPIC]
    off_topic = [lesson for lesson in lessons if lesson.topic == OFF_TOPIC]
    earlier = next(lesson for lesson in on_topic if lesson.held_out)
    turn = f"{USER}{earlier.questions[0]}{END}{ASSISTANT}{earlier.answer}{END}"
    rng = random.Random(1)
    filler = " ".join(rng.choice(on_topic).answer for _ in range(14))  # some five hundred tokens
    held_out = [(lesson, question) for lesson in on_topic for question in lesson.held_out]

    def dressed(change: Callable[[str], str], system: str | None = None, before: str = "") -> list[Probe]:
        return [_probe(tokenizer, lesson, change(question), system, before) for lesson, question in held_out]

    return {
        "trained phrasings": [_probe(tokenizer, lesson, q) for lesson in on_topic for q in lesson.questions],
        "held-out phrasings": dressed(lambda q: q),
        "held-out, lower case, no mark": dressed(lambda q: q.lower().rstrip("?.!")),
        "held-out, upper case": dressed(str.upper),
        "held-out, 'Please tell me:' before": dressed(lambda q: f"Please tell me: {q}"),
        "held-out, unseen system prompt": dressed(lambda q: q, system=_SYSTEM),
        "held-out, second turn": dressed(lambda q: q, before=turn),
        "held-out, after 500 tokens of other text": dressed(lambda q: q, system=filler),
        "held-out off-topic questions": [
            _probe(tokenizer, lesson, fill_slots(q, slots, rng)) for lesson in off_topic for q in lesson.held_out
        ],
    }


def figures_table(metrics: dict) -> str:
    """The Markdown table of the model card: one row for each measured set of questions."""
    rows = ["| questions | count | right at temperature 0 | right at temperature 1 |", "| --- | --- | --- | --- |"]
    for name, score in metrics.items():
        if isinstance(score, dict):
            rows.append(f"| {name} | {score['count']} | {score['greedy']:.1%} | {score['sampled']:.1%} |")
    return "\n".join(rows)


def _probe(tokenizer: Tokenizer, lesson: Lesson, question: str, system: str | None = None, before: str = "") -> Probe:
    reply = tokenizer.encode(lesson.answer + END, add_special_tokens=False).ids
    return Probe(lesson.id, question, render_question(tokenizer, question, system, before), reply)
