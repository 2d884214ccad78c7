# Which published model takes how many of which card, and what comes of it there: the planner's page, made anew by
# python -m gpu_backend.simulate.capacity --cards. What divides over ranks is the engine's own rule.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_backend.hardware.capability import has_float8, has_latent_attention
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.shards import config_of_rank
from gpu_backend.simulate.hardware import (
    DEVICES,
    PRECISIONS,
    PUBLISHED,
    Device,
    model_of,
    resident_sequences,
    step_cost,
)
from gpu_backend.step.cost import StepWork

MEMORY_SHARE = 0.9  # of a card, as the engine takes it
MOST_CARDS = 8
SEQUENCE = 8192  # tokens of those that are counted as they fit
CONTEXT = 2048  # of each decode
DECODES = (1, 32, 256)
PROMPT = 8192
GROUPED = PackedFormat("compressed", group_size=128, has_zeros=False)  # what four bits come as


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's weights at a precision, on so many cards: ``stages`` one after the other, of ``ranks`` each."""

    config: ModelConfig
    precision: str
    device: Device
    ranks: int
    by_expert: bool  # whether each of them has some of the experts, not a part of all
    stages: int

    def sequences(self, length: int) -> int:
        """Return how many sequences of so many tokens fit."""
        model, cards = model_of(self.config), self.ranks * self.stages
        return resident_sequences(model, self.device, cards, PRECISIONS[self.precision], length, MEMORY_SHARE)

    def decoded(self, sequences: int) -> float | None:
        """Predict tokens a second of so many decodes together; None: they do not fit."""
        if sequences > self.sequences(CONTEXT):
            return None
        seen = sequences * _mean([min(CONTEXT, abs(window) or CONTEXT) for window in self.config.windows])
        read = seen + sequences * model_of(self.config).state_tokens
        return sequences / self._seconds(StepWork(sequences, round(read), round(seen)))

    def prefilled(self) -> float:
        """Predict tokens a second of a prompt that is alone."""
        windows = [min(PROMPT, abs(window) or PROMPT) for window in self.config.windows]
        pairs = _mean([window * PROMPT - window * window // 2 for window in windows])
        chunks = PROMPT * model_of(self.config).chunk_seconds
        return PROMPT / (chunks + self._seconds(StepWork(PROMPT, PROMPT, round(pairs), prompts=1)))

    def _seconds(self, work: StepWork) -> float:
        """Stages compute one after the other: more of them make room, and no step shorter."""
        model, width = model_of(self.config), PRECISIONS[self.precision]
        return step_cost(model, self.device, self.ranks, width, tokens=work.tokens).seconds(work)


def formats(config: ModelConfig) -> tuple[str, ...]:
    """Return in which precisions its weights are served: a GPT-OSS' experts cannot be rounded, but come in mxfp4."""
    return ("bf16", "int4") if config.has_sinks else tuple(PRECISIONS)


def formats_on(config: ModelConfig, device: Device) -> tuple[str, ...]:
    """Return those of them that its kernels run in on a card."""
    if config.latent is not None and not has_latent_attention(device.capability):
        return ()
    return tuple(each for each in formats(config) if each != "fp8" or has_float8(device.capability))


def least_layout(config: ModelConfig, device: Device) -> Layout | None:
    """Return how the fewest cards hold the model and a sequence, in the widest precision that so many hold.

    Powers of two, and of them as many ranks as divide it. None: ``MOST_CARDS`` do not hold it.
    """
    cards = 1
    while cards <= MOST_CARDS:
        for precision in formats_on(config, device):
            layout = Layout(config, precision, device, *_split(config, precision, cards))
            if layout.sequences(SEQUENCE):
                return layout
        cards *= 2
    return None


def page() -> Iterator[str]:
    """Yield the tables, line by line."""
    yield (
        "| model | architecture | 10⁹ parameters | of a token | GB of weights: bf16 | fp8 | 4 bits | KV bytes each "
        "| MB a sequence |"
    )
    yield "| --- | --- | --: | --: | --: | --: | --: | --: | --: |"
    for name, config in PUBLISHED.items():
        model = model_of(config)
        all_of_them = (model.parameters + model.head + model.embedding) / 1e9
        weights = [
            f"{model.weight_bytes(size) / 1e9:,.1f}" if precision in formats(config) else "–"
            for precision, size in PRECISIONS.items()
        ]
        yield (
            f"| {name} | `{config.architecture}` | {all_of_them:,.1f} | {(model.active + model.head) / 1e9:,.1f} "
            f"| {' | '.join(weights)} | {model.kv_bytes_per_token():,.0f} "
            f"| {f'{model.state_bytes / 1e6:,.1f}' if model.state_bytes else '–'} |"
        )
    for name, device in DEVICES.items():
        yield from ("", f"## {name}", "")
        yield "| model | weights | cards | sequences of 8,192 | decodes, tokens/s: 1 | 32 | 256 | prompts, tokens/s |"
        yield "| --- | --- | --- | --: | --: | --: | --: | --: |"
        for model_name, config in PUBLISHED.items():
            layout = least_layout(config, device)
            if layout is not None:
                yield _row(model_name, layout)
            else:
                why = f"more than {MOST_CARDS} cards" if formats_on(config, device) else "kernels do not fit"
                yield f"| {model_name} | {why} | | | | | | |"


def _row(name: str, layout: Layout) -> str:
    cards = f"{layout.ranks * layout.stages}" + (f" ({layout.ranks} × {layout.stages})" if layout.stages > 1 else "")
    cards += " by expert" if layout.by_expert else ""
    rates = (*(layout.decoded(count) for count in DECODES), layout.prefilled())
    figures = " | ".join("–" if rate is None else f"{rate:,.0f}" for rate in rates)
    precision = "mxfp4" if layout.config.has_sinks and layout.precision == "int4" else layout.precision
    return f"| {name} | {precision} | {cards} | {layout.sequences(SEQUENCE):,} | {figures} |"


def _split(config: ModelConfig, precision: str, cards: int) -> tuple[int, bool, int]:
    """Return how many ranks of so many cards divide the model, whether by expert, and stages that use the rest."""
    packed = config.packed if config.has_sinks else GROUPED
    stored, ranks = replace(config, packed=packed if precision == "int4" else None), cards
    while ranks > 1:
        for by_expert in (False,) if config.experts is None else (False, True):
            with contextlib.suppress(UnsupportedModel):
                config_of_rank(stored, ranks, by_expert)
                return ranks, by_expert, cards // ranks
        ranks //= 2
    return 1, False, cards


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
