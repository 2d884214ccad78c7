# How often each running reply has each token, and which its prompt has: counted on the device, which keeps it from step
# to step, so that penalties cost the host nothing for tokens that it told before, or that the device drew itself.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_backend.kernels.layout.sampling_tensors import IN_PROMPT
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.step.plan import UNKNOWN, SequenceStep


class TokenCounts:
    """A row for each sequence that can run, and one more; there is none before the first whose reply is penalised."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = num_rows + 1, vocab_size
        self._device = device
        self._counts: Tensor | None = None  # (rows, vocab) int32

    def update(self, steps: Sequence[SequenceStep], last_tokens: Tensor) -> None:
        """Count the tokens that penalised steps follow: the text they bring, then one that ``last_tokens`` (rows,) has.

        A row begins anew with a text that is told from its first token on.
        """
        steps = [step for step in steps if step.samples and step.sampling.penalises_reply]
        if not steps:
            return
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        if begun := [step.row for step in steps if step.text and not step.text_start]:
            self._counts.index_fill_(0, self._upload(begun), 0)
        if told := [step for step in steps if step.text]:
            self._count_texts(told)
        if unknown := [step.row for step in steps if step.token_ids[0] == UNKNOWN]:
            rows = self._upload(unknown)
            self._add_one(rows, last_tokens.index_select(0, rows))

    @property
    def table(self) -> Tensor:
        """All rows (rows, vocab): ``reference.weigh_down`` says what they mean."""
        assert self._counts is not None, "there is no table before the first penalised step"
        return self._counts

    def of(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Return each step's row, (steps, vocab), with its drafts counted."""
        assert self._counts is not None, "penalised steps are counted before they are sampled"
        counts = self._counts.index_select(0, self._upload([step.row for step in steps]))
        if drafted := [(place, token) for place, step in enumerate(steps) for token in step.drafted]:
            places, tokens = upload(drafted, self._device, torch.long).t().unbind()
            counts.index_put_((places, tokens), counts.new_ones(()), accumulate=True)
        return counts

    def _count_texts(self, steps: Sequence[SequenceStep]) -> None:
        texts = [torch.frombuffer(bytearray(step.text), dtype=torch.int32) for step in steps]
        cuts = [max(0, step.num_prompt - step.text_start) for step in steps]
        told = list(zip([step.row for step in steps], texts, cuts, strict=True))
        assert self._counts is not None
        if any(cuts):
            prompts = self._places([(row, text[:cut]) for row, text, cut in told])
            self._counts.index_put_(prompts, self._counts.new_full((), IN_PROMPT))
        self._add_one(*self._places([(row, text[cut:]) for row, text, cut in told]))

    def _places(self, parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return rows and tokens of texts on the host, in one copy to the device."""
        rows = torch.cat([torch.full_like(text, row) for row, text in parts])
        both = torch.stack([rows, torch.cat([text for _, text in parts])])
        found, tokens = upload(both, self._device, torch.long).unbind()
        return found, tokens

    def _add_one(self, rows: Tensor, tokens: Tensor) -> None:
        assert self._counts is not None
        self._counts.index_put_((rows, tokens), self._counts.new_ones(()), accumulate=True)

    def _upload(self, rows: Sequence[int]) -> Tensor:
        return upload(rows, self._device, torch.long)
