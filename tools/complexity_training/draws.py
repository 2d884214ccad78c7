# How far the figures move with the draw of folds alone: the card's draw beside others that were fixed before they were
# read. A set of a few hundred rows may look better or worse by one draw than the model is.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from router.complexity.judging import HeldOut, apgr, calibration_error, errors_by_chance

Measure = Callable[[HeldOut], float]
MEASURES: tuple[Measure, ...] = (
    lambda held: apgr(held.scores, held.strong, held.weak),
    lambda held: apgr(held.plain, held.strong, held.weak),
    lambda held: calibration_error(held.scores, held.suffices),
)


def draw_figures(draws: Sequence[Mapping[str, HeldOut]], four: Sequence[str]) -> Iterator[str]:
    """Yield a table of what ``draws`` (sets by name) have in common: means, with the least and the most of one draw.

    Its last line is of the mean of ``four`` sets.
    """
    yield (
        f"| rows, {len(draws)} draws of folds | APGR [least, most] | plain baseline [least, most] "
        "| calibration error [least, most] | by chance (95 % below) | said less found |"
    )
    yield "|---|---|---|---|---|---|"
    for name in draws[0]:
        sets = [draw[name] for draw in draws]
        cells = [_spread([measure(held) for held in sets]) for measure in MEASURES]
        noise = np.concatenate([errors_by_chance(held.scores) for held in sets])
        bias = np.mean([held.scores.mean() - held.suffices.mean() for held in sets])
        yield f"| {name} | {' | '.join(cells)} | {noise.mean():.3f} ({np.quantile(noise, 0.95):.3f}) | {bias:+.3f} |"
    means = [
        _spread([float(np.mean([measure(draw[name]) for name in four])) for draw in draws]) for measure in MEASURES
    ]
    yield f"| mean of the four sets | {' | '.join(means)} | | |"


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"
