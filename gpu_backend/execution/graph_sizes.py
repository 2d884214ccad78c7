# Which steps graphs can compute, and of which size: a graph has a fixed number of places, each place room for as many
# tokens, and its attention cuts contexts into a fixed number of parts, as is best for the longest of a step.

from __future__ import annotations

from typing import NamedTuple

from gpu_backend.kernels.layout.paged import PagedLayouts
from gpu_backend.step.plan import SequenceStep, StepPlan

LEAST_REACH = 2048  # tokens of the longest context that a graph is for; others are for four times as many, and so on


class Size(NamedTuple):
    """What a graph is for. One computes any contexts, but most quickly those for which its splits were chosen."""

    places: int
    width: int  # tokens of each: one, or one and as many drafts as a sequence may get
    splits: int = 1  # parts that attention cuts contexts into
    adapted: bool = False  # whether places may have adapters


MOST_DRAFT_ROWS = 256  # tokens of a graph with drafts, or as many as there are places: logits have their room


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Return the places of graphs for up to ``most`` sequences: 1, 2, 4, multiples of eight, beyond 256 of 32."""
    sizes = [size for size in (1, 2, 4) if size < most]
    return (*sizes, *range(8, min(most, 256), 8), *range(256, most, 32), most)


def reach_of(longest: int) -> int:
    """Return the longest context of the graphs for steps whose longest one has so many tokens: few graphs for all."""
    reach = LEAST_REACH
    while reach < longest:
        reach *= 4
    return reach


def is_decode(plan: StepPlan) -> bool:
    """Whether every sequence of a plan computes one token, with or without drafts, and samples the next."""
    return all(step.num_known == 1 and step.samples and not (step.targets or step.pictures) for step in plan.sequences)


def draws_plainly(step: SequenceStep, but_for_penalties: bool = False) -> bool:
    """Whether a sequence's next token depends on logits, temperature, filters and noise alone, and maybe penalties."""
    asked = step.sampling
    if asked.is_plain or step.constraint is not None:
        return step.constraint is None
    if asked.logprobs is not None or asked.logit_bias or (asked.penalises_reply and not but_for_penalties):
        return False
    return step.num_generated - step.num_draft_tokens >= asked.min_tokens


class GraphSizes:
    """The sizes of graphs for up to ``most_places`` sequences, of up to ``max_drafts`` each and ``longest`` tokens."""

    def __init__(self, most_places: int, max_drafts: int, layouts: PagedLayouts, longest: int) -> None:
        self._layouts = layouts
        self._longest = longest
        self.places = sizes_up_to(most_places)
        self.width = 1 + max_drafts  # tokens of a place with drafts
        self.most_rows = max(most_places, MOST_DRAFT_ROWS)

    @property
    def most_ahead(self) -> int:
        """For how many sequences drafts are made and verified in one step."""
        return max([places for places in self.places if places * self.width <= self.most_rows], default=0)

    def fitting(self, plan: StepPlan) -> Size:
        """Return the smallest size for a plan of decodes."""
        width = self.width if any(step.num_draft_tokens for step in plan.sequences) else 1
        longest = max(step.start + len(step.token_ids) for step in plan.sequences)
        size = self.at(next(places for places in self.places if places >= len(plan.sequences)), width, longest)
        return size._replace(adapted=any(step.adapter for step in plan.sequences))

    def at(self, places: int, width: int = 1, longest: int = 1) -> Size:
        """Return the size for so many places of so many tokens, the longest context having ``longest``."""
        return Size(places, width, self._layouts.num_splits(width, places, min(reach_of(longest), self._longest)))

    def of(self, plan: StepPlan) -> Size | None:
        """Return the smallest size whose graph can compute a plan; None: none can."""
        if not plan.sequences or not is_decode(plan):
            return None
        size = self.fitting(plan)
        if min(step.start - step.slack + len(step.token_ids) for step in plan.sequences) < size.width:
            return None  # unused tokens come before a sequence's own, and there are none before
        return size if size.places * size.width <= self.most_rows else None
