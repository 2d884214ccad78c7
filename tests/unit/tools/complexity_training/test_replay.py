# The replay of compared calls, on two kinds of work whose answer is known.

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from router.complexity.judging import HeldOut
from router.complexity.text_stats import STATS_NAMES
from tools.complexity_training.dataset import outcomes_of
from tools.complexity_training.streams import Work, alone, drifting, routed, works_of


def work(name: str, level: float, seed: int, rows: int = 700) -> Work:
    """Prompts of about one shipped score; what all numbers of form tell of decides which a small model gets right."""
    dice = np.random.default_rng(seed)
    thing = dice.normal(size=(rows, 1))
    form = thing + dice.normal(size=(rows, len(STATS_NAMES))) / 2
    right = dice.random(rows) < 1 / (1 + np.exp(-(level + 3 * thing[:, 0])))
    return Work(name, 0.7 + dice.normal(size=rows) / 100, form, np.ones(rows), right.astype(float))


WORKS = [work("mostly right", 1.0, 1), work("mostly wrong", -1.0, 2)]


def test_comparisons_bring_what_the_shipped_score_lacks() -> None:
    """Three hundred rank nearly as the truth does and say how often a small model suffices; the score alone, moved,
    ranks as before."""
    *_, last, moved = alone(WORKS[1], 0)

    assert last.gain > 0.1 and last.error < 0.1
    assert abs(moved.gain) < 0.08


def test_work_that_drifts_is_learned_again() -> None:
    """What the second kind of work teaches counts above what the first did."""
    _, second = drifting(WORKS, None)

    assert second[-2].error < second[0].error
    assert second[-2].gain > 0.1


def test_calls_that_are_routed_by_what_was_learned_lose_less() -> None:
    """At a quality of 0.7 the shipped score sends half of each kind to small models, at a loss."""
    brought, small = routed(WORKS, 0, 0.7, explores=True, draws=False)

    assert brought > 0 and 0 < small < 1


def test_figures_have_a_line_for_each_kind_of_work_and_each_stream() -> None:
    """The tables are whole: heads, lines and means."""
    # It brings scikit-learn, which takes a second that only the process that runs these tests should spend.
    from tools.complexity_training.replay import alone_figures, drift_figures, mixed_figures

    table = [*alone_figures(WORKS, (0,)), *drift_figures(WORKS, (0,)), *mixed_figures(WORKS, (0,), (0, 100))]

    assert [line.split(" | ")[0] for line in table if line.startswith("| mostly")] == [
        "| mostly right",
        "| mostly wrong",
    ]
    assert sum(line.startswith("| in ") for line in table) == 2
    assert not any("nan" in line for line in table)


def test_outcomes_that_others_judge_by_are_in_no_stream() -> None:
    """Rows of ARC and MBPP are left out, and pairs of few rows."""
    prompts = [f"Which is {number}?" for number in range(80)]
    domain = np.array(["arc_challenge", "trivia_qa"] * 40)
    ones, pair = np.ones(80), np.full(80, "a and b")
    outcomes = outcomes_of(prompts, np.full(80, "ulab"), domain, ones, 0 * ones, pair)
    _, number = np.unique(np.array(prompts), return_inverse=True)
    held = HeldOut("set", ones, 0 * ones, ones / 2, ones / 2, ones, pair, number)

    [kept] = works_of([held], outcomes, least=40)

    assert len(kept.scores) == 40 and works_of([held], outcomes, least=41) == []


def test_without_outcomes_the_replay_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, and writes nothing."""
    from tools.complexity_training.replay import main

    page = tmp_path / "page.md"
    page.write_text("kept")
    absent = str(tmp_path / "none.csv.gz")
    monkeypatch.setattr(sys, "argv", ["replay", "--data", absent, "--more", absent, "--page", str(page)])
    main()

    assert capsys.readouterr().out.startswith("SKIPPED: ") and page.read_text() == "kept"
