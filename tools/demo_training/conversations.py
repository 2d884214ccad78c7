# Lessons become training examples here: token ids and, for each, whether the model is to learn to say it. Chats of one
# to three turns, with and without a system prompt, long contexts, and plain text for the completions route.

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from tools.demo_training.lessons import OFF_TOPIC, Lesson, fill_slots
from tools.demo_training.phrasing import Wordings, vary
from tools.demo_training.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER

# Shares of the examples; what is left is a single question without a system prompt.
_PLAIN_SHARE = 0.06
_LONG_SHARE = 0.02
_SYSTEM_SHARE = 0.2
_TURNS_SHARE = 0.12
_OFF_TOPIC_SHARE = 0.13
_FOLLOW_UP_SHARE = 0.5
# Understanding a question shows in the first words of its answer and the rest is soon known by heart, so many single
# answers are cut there: the same computation then sees more questions.
_CUT_SHARE = 0.5
_CUT_AFTER = 8  # tokens
_ROOM = 300  # tokens kept for the question and the answer behind a long context


@dataclass(frozen=True, slots=True)
class Example:
    """``learns[i]`` is true when ``token_ids[i]`` is one the model should have said."""

    token_ids: list[int]
    learns: list[bool]


class Composer:
    """Draws endless examples from the lessons; equal seeds draw equal examples."""

    def __init__(
        self,
        lessons: list[Lesson],
        slots: dict[str, list[str]],
        words: Wordings,
        tokenizer: Tokenizer,
        context: int,
        seed: int,
    ) -> None:
        self._on_topic = [lesson for lesson in lessons if lesson.topic != OFF_TOPIC]
        self._off_topic = [lesson for lesson in lessons if lesson.topic == OFF_TOPIC]
        # A refusal stands for a world of questions, so it is drawn as often as it has phrasings.
        self._off_topic_weights = [len(lesson.questions) for lesson in self._off_topic]
        self._slots = slots
        self._words = words
        self._tokenizer = tokenizer
        self._context = context
        self._rng = random.Random(seed)
        self._deck: list[Lesson] = []
        self._held_out = {_bare(question) for lesson in lessons for question in lesson.held_out}

    def draw(self) -> Example:
        """One training example of at most ``context`` tokens."""
        draw = self._rng.random()
        if draw < _PLAIN_SHARE:
            return self._plain_text()
        if draw < _PLAIN_SHARE + _LONG_SHARE:
            return self._long_chat()
        return self._chat()

    def _chat(self) -> Example:
        turns = self._rng.choice((2, 2, 3)) if self._rng.random() < _TURNS_SHARE else 1
        system = self._system_prompt() if self._rng.random() < _SYSTEM_SHARE else None
        example = self._render(system, self._turns(turns))
        if turns == 1 and self._rng.random() < _CUT_SHARE:
            kept = example.learns.index(True) + _CUT_AFTER
            return Example(example.token_ids[:kept], example.learns[:kept])
        return example

    def _system_prompt(self) -> str:
        """One to three of the written prompts in a row, so that none is known by heart."""
        prompts = self._rng.choices(self._words.system_prompts, k=self._rng.choice((1, 1, 2, 3)))
        return fill_slots(" ".join(prompts), self._slots, self._rng)

    def _long_chat(self) -> Example:
        """A chat behind a few hundred tokens of text that does not matter to the question."""
        filler = self._filler(self._rng.randrange(100, self._context - _ROOM))
        if self._rng.random() < 0.4:
            return self._render(filler, self._turns(1))
        if self._rng.random() < 0.5:
            return self._render(None, self._turns(self._rng.randrange(4, 12)))
        (question, lesson), *_ = self._turns(1)
        return self._render(None, [(f"{filler}\n\n{question}", lesson)])

    def _turns(self, count: int) -> list[tuple[str, Lesson]]:
        turns: list[tuple[str, Lesson]] = []
        for _ in range(count):
            lesson = self._next_lesson()
            if turns and self._rng.random() < _FOLLOW_UP_SHARE:
                lesson = self._follow_up_to(turns[-1][1]) or lesson
                if lesson.follow_ups and lesson.topic == turns[-1][1].topic:
                    turns.append((self._vary(self._rng.choice(lesson.follow_ups)), lesson))
                    continue
            question = self._rng.choice(lesson.questions)
            turns.append((self._vary(question), lesson))
        return turns

    def _follow_up_to(self, lesson: Lesson) -> Lesson | None:
        others = [o for o in self._on_topic if o.topic == lesson.topic and o.follow_ups and o.id != lesson.id]
        return self._rng.choice(others) if others else None

    def _vary(self, question: str) -> str:
        while True:  # a variant that happens to be a held-out phrasing is drawn again
            varied = vary(fill_slots(question, self._slots, self._rng), self._words, self._rng)
            if _bare(varied) not in self._held_out:
                return varied

    def _next_lesson(self) -> Lesson:
        if self._off_topic and self._rng.random() < _OFF_TOPIC_SHARE:
            return self._rng.choices(self._off_topic, self._off_topic_weights)[0]
        if not self._deck:  # a shuffled deck teaches every lesson as often as its weight says
            self._deck = [lesson for lesson in self._on_topic for _ in range(lesson.weight)]
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def _filler(self, tokens: int) -> str:
        """Text of about ``tokens`` tokens: sentences of the lessons, one word over and over, or stray words."""
        draw = self._rng.random()
        sentences: list[str] = []
        word = self._rng.choice(self._rng.choice(self._on_topic).answer.split())
        while len(self._tokenizer.encode(" ".join(sentences), add_special_tokens=False).ids) < tokens:
            for _ in range(20):
                if draw < 0.5:
                    sentences.append(self._rng.choice(self._on_topic).answer)
                elif draw < 0.75:
                    sentences.append(word)
                else:
                    sentences.append("".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=5)))
        ids = self._tokenizer.encode(" ".join(sentences), add_special_tokens=False).ids[:tokens]
        return self._tokenizer.decode(ids)

    def _plain_text(self) -> Example:
        """Sentences without turns, as the completions route sends them; a question may stand before its answer."""
        lesson = self._next_lesson()
        if lesson.topic == OFF_TOPIC or self._rng.random() < 0.3:
            question = self._vary(self._rng.choice(lesson.questions))
            question += self._rng.choice(("\n", "\n", "\n\n", " "))
        else:
            question = ""
        ids = [self._id(BOS)] if self._rng.random() < 0.8 else []
        ids += self._encode(question, loosely=True)
        learns = [False] * len(ids)
        answer = self._encode(lesson.answer)
        ids += [*answer, self._id(END)]
        learns += [True] * (len(answer) + 1)
        return Example(ids, learns)

    def _render(self, system: str | None, turns: list[tuple[str, Lesson]]) -> Example:
        ids = [self._id(BOS)]
        if system is not None:
            ids += [self._id(SYSTEM), *self._encode(system, loosely=True), self._id(END)]
        learns = [False] * len(ids)
        for question, lesson in turns:
            asked = [self._id(USER), *self._encode(question.strip(), loosely=True), self._id(END), self._id(ASSISTANT)]
            said = [*self._encode(lesson.answer), self._id(END)]
            if len(ids) + len(asked) + len(said) > self._context and any(learns):
                break
            ids += asked + said
            learns += [False] * len(asked) + [True] * len(said)
        return Example(ids, learns)

    def _encode(self, text: str, loosely: bool = False) -> list[int]:
        """Token ids of ``text``; loosely, some merges are skipped (BPE dropout, Provilkov et al. 2020)."""
        self._tokenizer.model.dropout = 0.1 if loosely and self._rng.random() < 0.25 else None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._tokenizer.model.dropout = None
        return ids

    def _id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id


def _bare(question: str) -> str:
    return " ".join(question.lower().split()).rstrip("?.! ")


def render_question(tokenizer: Tokenizer, question: str, system: str | None = None, before: str = "") -> list[int]:
    """Token ids of a chat that ends where the assistant begins to speak; ``before`` is an earlier turn, rendered."""
    head = BOS + (f"{SYSTEM}{system}{END}" if system else "") + before
    return list(tokenizer.encode(f"{head}{USER}{question}{END}{ASSISTANT}", add_special_tokens=False).ids)
