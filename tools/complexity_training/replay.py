# Replays benchmarks as a team's calls, compared one after another: how many comparisons bring which gain.
#   python -m tools.complexity_training.replay --data OUTCOMES.csv.gz --more OUTCOMES2.csv.gz

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from router.complexity.judging import Floats, apgr, calibration_error
from tools.complexity_training.dataset import read_outcomes
from tools.complexity_training.evaluate import ALONE, held_out_sets
from tools.complexity_training.streams import (
    COUNTS,
    Judged,
    Work,
    alone,
    drifting,
    joined,
    judged,
    learned_from,
    routed,
    works_of,
)

PLANS = ("subjects", "sums", "pair", *(benchmark for benchmark, _ in ALONE.values()))
BROKEN = "with broken"  # in the names of sets whose labels are
DRAWS = range(5)
MIXED = (0, 100, 300, 1_000)
QUALITIES = (0.6, 0.7, 0.8)
PAGE = Path("docs/experiments/router/compared-calls.md")
FIGURES = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- end of figures -->)", re.DOTALL)
RULES = {
    "compared on both sides, by the mean": (True, False),
    "compared on both sides, Thompson's draw": (True, True),
    "only small models' calls compared, by the mean": (False, False),
    "only small models' calls compared, Thompson's draw": (False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.complexity_training.replay", description="Replay benchmarks as a team's compared calls."
    )
    parser.add_argument("--data", type=Path, required=True, help="gzipped CSV of outcomes")
    parser.add_argument("--more", type=Path, required=True, help="the same of other models")
    parser.add_argument("--cache", type=Path, help="folder for scores, which take some minutes")
    parser.add_argument("--page", type=Path, default=PAGE, help="page whose figures are renewed")
    arguments = parser.parse_args()
    if not (arguments.data.exists() and arguments.more.exists()):
        print(f"SKIPPED: no outcomes at {arguments.data} and {arguments.more}.")
        return
    outcomes, more = read_outcomes(arguments.data), read_outcomes(arguments.more)
    held = [each for each in held_out_sets(outcomes, more, arguments.cache, names=PLANS) if BROKEN not in each.name]
    works = works_of(held, outcomes + more)
    table = "\n".join(
        [*alone_figures(works), "", *drift_figures(works), "", *mixed_figures(works), "", *routed_figures(works)]
    )
    print(table)
    if arguments.page.exists():
        arguments.page.write_text(FIGURES.sub(lambda _: f"\n{table}\n\n", arguments.page.read_text()))


def alone_figures(works: Sequence[Work], draws: Sequence[int] = DRAWS) -> Iterator[str]:
    """Yield a table: what a team that does one kind of work has after so many comparisons of it."""
    counts = " | ".join(f"after {count}" for count in COUNTS[1:])
    yield (
        f"| one kind of work | shipped | {counts} | error of calibration, shipped | after {COUNTS[-1]} | by chance "
        "| score alone |"
    )
    yield "|---|" + "---|" * (len(COUNTS) + 4)
    lines = []
    for work in works:
        found = [alone(work, draw) for draw in draws]
        shipped = apgr(work.scores, work.strong, work.weak)
        lines.append([shipped, *_means(found)])
        yield _line(work.name, lines[-1])
    yield _line("mean", np.mean(lines, 0).tolist())


def drift_figures(works: Sequence[Work], draws: Sequence[int] = DRAWS) -> Iterator[str]:
    """Yield a table: the same for a team whose work moves from one to the next, in the order above and in others."""
    counts = " | ".join(f"after {count} of it" for count in COUNTS)
    yield f"| one after another: APGR above the shipped score | {counts} |"
    yield "|---|" + "---|" * len(COUNTS)
    streams = {"in the order above": [drifting(works, None)], "in other orders": [drifting(works, d) for d in draws]}
    for name, found in streams.items():
        gains = np.array([[[one.gain for one in of_work[:-1]] for of_work in stream] for stream in found])
        means = gains.mean(1)
        spread = [f"{mean:+.3f}" for mean in means.mean(0)]
        if len(means) > 1:
            spread = [
                f"{cell} [{low:+.3f}, {high:+.3f}]"
                for cell, low, high in zip(spread, means.min(0), means.max(0), strict=True)
            ]
        yield f"| {name} | {' | '.join(spread)} |"
    every = [of_work for stream in streams["in other orders"] for of_work in stream]
    errors = np.array([[one.error for one in of_work] for of_work in every]).mean(0)
    chance = np.array([[one.by_chance for one in of_work] for of_work in every]).mean(0)
    yield f"| error of calibration, mean of each work by itself | {_cells(errors[:-1])} |"
    yield f"| the same by chance | {_cells(chance[:-1])} |"
    pooled = [
        np.mean([_pooled([of_work[place] for of_work in stream]) for stream in streams["in other orders"]])
        for place in range(len(COUNTS) + 1)
    ]
    yield f"| error of calibration, of all the stream's calls together | {_cells(pooled[:-1])} |"
    yield (
        f"| score alone (`calibration_of`) on the newest {2 * COUNTS[-1]}: each by itself {errors[-1]:.3f}, "
        f"together {pooled[-1]:.3f} |" + " |" * len(COUNTS)
    )


def mixed_figures(works: Sequence[Work], draws: Sequence[int] = DRAWS, counts: Sequence[int] = MIXED) -> Iterator[str]:
    """Yield a table: a team that does all kinds of work at once."""
    yield "| all kinds at once, comparisons | APGR | error of calibration | by chance |"
    yield "|---|---|---|---|"
    for count in counts:
        found = []
        for draw in draws:
            dice = np.random.default_rng(draw)
            each = -(-counts[-1] // len(works))
            parts = [work.split(each, dice) for work in works]
            rest = joined([rest.take(np.arange(min(300, len(rest.scores)))) for _, rest in parts])
            asked = joined([asked for asked, _ in parts])
            asked = asked.take(dice.permutation(len(asked.scores))[:count])
            scores = rest.scores if not count else learned_from(asked).chances(rest.scores, rest.form)[0]
            found.append((apgr(scores, rest.strong, rest.weak), *judged(scores, rest)[1:3]))
        yield f"| {count} | {_cells(np.mean(found, 0))} |"


def routed_figures(works: Sequence[Work], draws: Sequence[int] = DRAWS) -> Iterator[str]:
    """Yield a table: what calls bring by rule of choosing; a small answer 1 - quality where it suffices, else
    -quality, and a large one nothing."""
    yield "| brought by 100 calls (share to small models) | " + " | ".join(f"at {each}" for each in QUALITIES) + " |"
    yield "|---|" + "---|" * len(QUALITIES)
    shipped = [_by_shipped(works, quality) for quality in QUALITIES]
    yield f"| by the shipped score | {' | '.join(shipped)} |"
    for name, (explores, draws_chance) in RULES.items():
        cells = []
        for quality in QUALITIES:
            found = [routed(works, draw, quality, explores=explores, draws=draws_chance) for draw in draws]
            brought, small = np.mean(found, 0)
            cells.append(f"{100 * brought:+.1f} ({small:.0%})")
        yield f"| {name} | {' | '.join(cells)} |"


def _by_shipped(works: Sequence[Work], quality: float) -> str:
    brought = [np.where(work.scores >= quality, work.suffices - quality, 0.0).mean() for work in works]
    small = [(work.scores >= quality).mean() for work in works]
    return f"{100 * np.mean(brought):+.1f} ({np.mean(small):.0%})"


def _means(found: Sequence[Sequence[Judged]]) -> list[float]:
    """Return mean gains after each count, errors before and after, what chance gives, and the score's alone."""
    gains = np.array([[one.gain for one in draw] for draw in found]).mean(0)
    errors = np.array([[one.error for one in draw] for draw in found]).mean(0)
    chance = float(np.mean([draw[-2].by_chance for draw in found]))
    return [*gains[1:-1].tolist(), errors[0], errors[-2], chance, errors[-1]]


def _pooled(judgements: Sequence[Judged]) -> float:
    scores: Floats = np.concatenate([one.scores for one in judgements])
    return calibration_error(scores, np.concatenate([one.suffices for one in judgements]))


def _line(name: str, values: Sequence[float]) -> str:
    shipped, *gains = values[: len(COUNTS)]
    cells = [f"{shipped:.3f}", *(f"{gain:+.3f}" for gain in gains), *(f"{one:.3f}" for one in values[len(COUNTS) :])]
    return f"| {name} | {' | '.join(cells)} |"


def _cells(values: Sequence[Any] | Floats) -> str:
    return " | ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
