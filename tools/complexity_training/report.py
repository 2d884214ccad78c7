# The figures of the model card, from scores on held-out rows: tables in Markdown and two pictures in SVG.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from router.complexity.judging import (
    BINS,
    SHARES,
    Floats,
    HeldOut,
    apgr_of,
    calibration_error,
    calibration_noise,
    gap_recovered,
    redrawn,
)
from tools.complexity_training.comparisons import comparison_figures

QUALITIES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
# What the goal is about: other rows of two benchmarks, subjects that were not fitted, and another pair of models.
NEVER_FITTED = "another pair never fitted"
FOUR = ("MMLU other rows", "GSM8K other rows", "MMLU unseen subjects", NEVER_FITTED)
LEFT_OUT = (
    *("GSM8K no sums fitted", "GSM8K of later models, no sums fitted", NEVER_FITTED, "a panel never fitted"),
    *("MMLU-Pro left out", "CRUXEval left out", "MATH left out", "open chat left out", "Vicuna's chat left out"),
)
MEANS = {
    "the four sets": FOUR,
    "with the broken subject": ("MMLU with broken subject", FOUR[1], "MMLU unseen subjects with broken one", FOUR[3]),
    "benchmarks left out whole": LEFT_OUT,
}
COLOURS = ("#0b6e4f", "#c1440e", "#3b5bdb", "#8a2be2", "#b8860b", "#555555", "#d6336c", "#0891b2")
SIZE, LEFT, TOP = 360, 60, 20  # pixels of the square that a curve is drawn in, and where it begins


def figures(sets: Sequence[HeldOut]) -> Iterator[str]:
    """Yield the tables line by line: how well rows are ranked and calibrated, and what a threshold costs and brings."""
    yield (
        "| rows | n | APGR [95 %] | plain baseline [95 %] | more than plain [95 %] | length | random "
        "| calibration error | by chance | small suffices |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for held in sets:
        yield (
            f"| {held.name} | {len(held.scores)} | {_beside_plain([held])} | {apgr_of(held, held.length):.3f} | 0.500 "
            f"| {calibration_error(held.scores, held.suffices):.3f} | {calibration_noise(held.scores):.3f} "
            f"| {held.suffices.mean():.3f} |"
        )
    yield ""
    yield from _means({held.name: held for held in sets})
    yield "| rows | quality asked | calls to the large model | share right | small alone | large alone |"
    yield "|---|---|---|---|---|---|"
    for held in sets:
        if held.name in ("MMLU other rows", NEVER_FITTED):
            for quality in QUALITIES:
                is_large = held.scores < quality
                right = np.where(is_large, held.strong, held.weak).mean()
                yield (
                    f"| {held.name} | {quality:.2f} | {is_large.mean():.0%} | {right:.3f} "
                    f"| {held.weak.mean():.3f} | {held.strong.mean():.3f} |"
                )
    for held in sets:
        if held.name == NEVER_FITTED:
            yield ""
            yield from comparison_figures(held)


def _means(sets: Mapping[str, HeldOut]) -> Iterator[str]:
    """Yield the table of means over four sets, as far as they are there."""
    yield "| mean of | APGR [95 %] | plain baseline [95 %] | more than plain [95 %] | length | random |"
    yield "|---|---|---|---|---|---|"
    for name, members in MEANS.items():
        if all(member in sets for member in members):
            chosen = [sets[member] for member in members]
            length = np.mean([apgr_of(held, held.length) for held in chosen])
            yield f"| {name} | {_beside_plain(chosen)} | {length:.3f} | 0.500 |"
    yield ""


def _beside_plain(sets: Sequence[HeldOut]) -> str:
    """Return three cells: the mean APGR of scores, of the plain baseline, and their paired difference."""
    found = np.mean([[apgr_of(held, scores) for scores in (held.scores, held.plain)] for held in sets], axis=0)
    drawn = np.mean([redrawn(held, held.scores, held.plain) for held in sets], axis=0)
    low, high = np.quantile(np.vstack([drawn, drawn[0] - drawn[1]]), (0.025, 0.975), axis=1)
    cells = [f"{found[kind]:.3f} [{low[kind]:.3f}, {high[kind]:.3f}]" for kind in range(2)]
    return " | ".join([*cells, f"{found[0] - found[1]:+.3f} [{low[2]:+.3f}, {high[2]:+.3f}]"])


def curves(sets: Sequence[HeldOut]) -> str:
    """Return the picture of the gap recovered over the share of calls to the large model."""
    return _picture(
        sets, lambda held: (SHARES, gap_recovered(held.scores, held.strong, held.weak)), "calls to the large model",
        "gap recovered",
    )  # fmt: skip


def calibration(sets: Sequence[HeldOut]) -> str:
    """Return the picture of how often a small model sufficed over what was said, in bins of equal numbers of rows."""

    def binned(held: HeldOut) -> tuple[Floats, Floats]:
        bins = np.array_split(np.argsort(held.scores, kind="stable"), BINS)
        said, found = [[values[b].mean() for b in bins] for values in (held.scores, held.suffices)]
        return np.array(said), np.array(found)

    return _picture(sets, binned, "said: a small model suffices", "found")


def _picture(
    sets: Sequence[HeldOut], points_of: Callable[[HeldOut], tuple[Floats, Floats]], across: str, up: str
) -> str:
    """Return an SVG of one line for each set, on axes from 0 to 1, beside the diagonal."""
    shapes = []
    for tick in np.linspace(0, 1, 6):
        x, y = LEFT + SIZE * tick, TOP + SIZE * (1 - tick)
        shapes.append(f'<path d="M{x:.0f} {TOP}V{TOP + SIZE}M{LEFT} {y:.0f}H{LEFT + SIZE}" stroke="#ddd"/>')
        shapes.append(f'<text x="{x:.0f}" y="{TOP + SIZE + 16}" text-anchor="middle">{tick:.1f}</text>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:.1f}</text>')
    shapes.append(f'<path d="M{LEFT} {TOP + SIZE}L{LEFT + SIZE} {TOP}" stroke="#999" stroke-dasharray="4"/>')
    for place, held in enumerate(sets):
        colour = COLOURS[place % len(COLOURS)]
        pairs = zip(*points_of(held), strict=True)
        points = " ".join(f"{LEFT + SIZE * x:.1f},{TOP + SIZE * (1 - y):.1f}" for x, y in pairs)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        below = TOP + 12 + 18 * place
        shapes.append(f'<text x="{LEFT + SIZE + 14}" y="{below}" fill="{colour}">{held.name}</text>')
    middle = TOP + SIZE / 2
    shapes.append(f'<text x="{LEFT + SIZE / 2}" y="{TOP + SIZE + 36}" text-anchor="middle">{across}</text>')
    shapes.append(f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{up}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + SIZE + 220} {TOP + SIZE + 46}"'
    return f'{head} font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>\n' + (
        "\n".join(shapes) + "\n</svg>\n"
    )
