# Fits the complexity model, judges the same recipe on held-out rows, and writes the artefact and the card's figures:
#   python -m tools.complexity_training --data OUTCOMES.csv.gz --more OUTCOMES2.csv.gz

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tools.complexity_training.dataset import believed_outcomes, read_outcomes
from tools.complexity_training.draws import draw_figures
from tools.complexity_training.evaluate import DRAWN, OTHER_DRAWS, held_out_sets
from tools.complexity_training.fit import SEED, FittedComplexity, export
from tools.complexity_training.report import FOUR, NEVER_FITTED, calibration, curves, figures

FIGURES = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- end of figures -->)", re.DOTALL)
PICTURED = ("MMLU other rows", "GSM8K other rows", "MMLU unseen subjects", "another pair never fitted")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.complexity_training", description="Fit and judge the complexity model."
    )
    parser.add_argument("--data", type=Path, required=True, help="gzipped CSV of outcomes")
    parser.add_argument("--more", type=Path, required=True, help="the same of other models, for words alone")
    parser.add_argument("--out", type=Path, default=Path("router/complexity/artifacts"), help="folder for the artefact")
    card = Path("router/complexity/artifacts/MODEL_CARD.md")
    parser.add_argument("--card", type=Path, default=card, help="card whose figures are renewed")
    parser.add_argument("--cache", type=Path, help="folder for scores, so that a long run can be taken up again")
    parser.add_argument("--no-evaluation", action="store_true", help="only fit")
    arguments = parser.parse_args()

    outcomes, more, believed = read_outcomes(arguments.data), read_outcomes(arguments.more), believed_outcomes()
    fitted = outcomes.take(outcomes.is_sound)
    facts: dict[str, object] = {"rows": len(fitted), "more": len(more), "believed": len(believed), "seed": SEED}
    export(FittedComplexity().fit(fitted, believed, more), arguments.out, facts)
    print(f"fitted on {len(fitted)} + {len(more)} outcomes and {len(believed)} beliefs; wrote {arguments.out}")
    if arguments.no_evaluation:
        return
    sets = list(held_out_sets(outcomes, more, arguments.cache))
    named = {held.name: held for held in sets}
    redrawn = [
        {held.name: held for held in held_out_sets(outcomes, more, arguments.cache, seed, DRAWN)}
        for seed in OTHER_DRAWS
    ]
    # What is fitted without any fold is the same in every draw.
    draws = [{name: (named | draw)[name] for name in (*redrawn[0], NEVER_FITTED)} for draw in ({}, *redrawn)]
    table = "\n".join([*figures(sets), "", *draw_figures(draws, FOUR)])
    print(table)
    pictured = [held for held in sets if held.name in PICTURED]
    (arguments.card.parent / "complexity-curves.svg").write_text(curves(pictured))
    (arguments.card.parent / "complexity-calibration.svg").write_text(calibration(pictured))
    if arguments.card.exists():
        arguments.card.write_text(FIGURES.sub(lambda _: f"\n{table}\n\n", arguments.card.read_text()))


if __name__ == "__main__":
    main()
