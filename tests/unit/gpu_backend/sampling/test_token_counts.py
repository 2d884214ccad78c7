# What penalties look back at is counted on the device: whatever the order in which steps are planned and their tokens
# become known, it is what the prompt and the reply have.

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.execution.runner import Runner
from gpu_backend.kernels.layout.sampling_tensors import IN_PROMPT
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.sampling.verification import rows_of
from gpu_backend.step.messages import Generate
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.sequence import ReplyTimes, Sequence
from tests.support.engine import answer_all, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

VOCAB, ROWS = 12, 3
PENALISED = SamplingParams(max_tokens=99, repetition_penalty=1.2, frequency_penalty=0.5)
CPU = torch.device("cpu")


class Replies:
    """Penalised sequences, a row each, and what the device has counted of them."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.counts = TokenCounts(ROWS, VOCAB, CPU)
        self.last_tokens = torch.zeros(ROWS, dtype=torch.long)
        self.sequences = [
            Sequence(row, Generate(str(row), tuple(prompt), PENALISED), PENALISED, 999, ReplyTimes(0.0), row=row)
            for row, prompt in enumerate(prompts)
        ]
        self.unread: list[dict[int, int]] = []  # tokens by row, of the steps whose results are not read

    def launch(self, rows: set[int], token: int) -> None:
        """Plan a step of these rows, check what is counted for it, and draw a token for each."""
        steps = [s.plan(s.remaining, 4) for s in self.sequences if s.row in rows]
        self.counts.update(steps, self.last_tokens)
        for step in steps:
            self.check(step, [])
        drawn = {step.row: (token + step.row) % VOCAB for step in steps}
        for row, drew in drawn.items():
            self.last_tokens[row] = drew
        self.unread.append(drawn)

    def read(self) -> None:
        """Let the host have the tokens of the oldest step."""
        for row, token in self.unread.pop(0).items():
            self.sequences[row].append(token)
            self.sequences[row].num_awaited -= 1

    def preempt(self, row: int) -> None:
        """Take a sequence's row; it begins anew."""
        while self.unread:
            self.read()
        self.sequences[row].restart()
        self.sequences[row].num_on_device = 0

    def check(self, step: SequenceStep, drafted: list[int]) -> None:
        sequence = self.sequences[step.row]
        under_way = [drawn[step.row] for drawn in self.unread if step.row in drawn]
        expected = Counter(sequence.token_ids[sequence.num_prompt :] + under_way + drafted)
        (found,) = self.counts.of([step]).tolist()

        assert [count % IN_PROMPT for count in found] == [expected[token] for token in range(VOCAB)]
        prompt = sequence.request.prompt_token_ids
        assert [count >= IN_PROMPT for count in found] == [token in prompt for token in range(VOCAB)]


tokens = st.integers(0, VOCAB - 1)
acts = st.one_of(
    st.tuples(st.just("launch"), st.sets(st.integers(0, ROWS - 1), min_size=1), tokens),
    st.tuples(st.just("read"), st.none(), st.none()),
    st.tuples(st.just("preempt"), st.integers(0, ROWS - 1), st.none()),
)


@given(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=ROWS, max_size=ROWS), st.lists(acts, max_size=25))
@settings(max_examples=80, deadline=None)
def test_counts_are_those_of_prompt_and_reply(prompts: list[list[int]], acts: list[tuple[str, object, int]]) -> None:
    """Of steps that are launched before or after the last one's tokens are read, and of preempted sequences."""
    replies = Replies(prompts)
    for act, what, token in acts:
        if act == "launch" and isinstance(what, set):
            if len(replies.unread) == 2:
                replies.read()
            while any(replies.sequences[row].num_awaited > 0 for row in what) and len(replies.unread) > 1:
                replies.read()
            replies.launch(what, token)
        elif act == "preempt" and isinstance(what, int):
            replies.preempt(what)
        elif replies.unread:
            replies.read()


def test_drafts_count_for_the_places_behind_them_alone() -> None:
    """A place counts the drafts before it; the next step counts those that held, which the host tells then."""
    replies = Replies([[1, 2], [3], [4]])
    replies.launch({0}, 5)
    replies.read()
    sequence = replies.sequences[0]
    step = sequence.plan(1, 4)
    drafting = SequenceStep(0, (5, 7, 7, 8), step.start, (), True, PENALISED, 0, num_prompt=2, num_draft_tokens=3)
    drafting.text, drafting.text_start = step.text, step.text_start
    replies.counts.update([drafting], replies.last_tokens)
    for count, place in enumerate(rows_of(drafting)):
        replies.check(place, [7, 7, 8][:count])
    for token in (7, 9):  # one draft held
        sequence.append(token)
    sequence.num_awaited, sequence.num_computed = 0, len(sequence.token_ids) - 1

    replies.launch({0}, 1)  # checks


def test_a_device_that_draws_is_told_a_reply_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step is launched before the last one is read, only the prompt crosses, however long the reply gets."""
    loop = model_loop(write_tiny_model(tmp_path, TinyModel()), async_scheduling=True, max_num_seqs=2)
    assert isinstance(loop.runner, Runner)
    told: list[int] = []
    update = loop.runner._counts.update

    def note(steps: tuple[SequenceStep, ...], last_tokens: torch.Tensor) -> None:
        told.append(sum(len(step.text) // 4 for step in steps))
        update(steps, last_tokens)

    monkeypatch.setattr(loop.runner._counts, "update", note)
    answer_all(loop, [Generate("a", tuple(range(30)), PENALISED), Generate("b", tuple(range(50)), SamplingParams(20))])

    assert told[0] == 30 and not any(told[1:]) and len(told) > 90
