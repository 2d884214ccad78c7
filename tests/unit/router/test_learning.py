# What a team's compared calls teach: which form suffices, how often, how sure that is, and how soon drift is followed.

from __future__ import annotations

import numpy as np
import pytest

from protocol.inference import Request
from router.complexity.classifier import Complexity
from router.complexity.text_stats import STATS_NAMES
from router.learning import Bools, Floats, learn, own_scores, packed, packed_form, unpacked
from router.recalibration import LEAST_COMPARISONS, Comparison
from router.team_score import TeamScore
from tests.unit.router.examples import chat

NUMBERS = len(STATS_NAMES)
LOADINGS = np.random.default_rng(0).normal(size=(3, NUMBERS))


def calls(count: int, level: float, by_form: float, seed: int) -> tuple[Floats, Floats, Bools, Floats]:
    """Calls of one score, 0.7, whose true logit is ``level`` and ``by_form`` of the first of three things that all
    numbers of form tell of: scores, forms, outcomes, and true chances."""
    dice = np.random.default_rng(seed)
    things = dice.normal(size=(count, 3))
    form = things @ LOADINGS + dice.normal(size=(count, NUMBERS)) / 2
    chances = 1 / (1 + np.exp(-(level + by_form * things[:, 0])))
    return np.full(count, 0.7), form, dice.random(count) < chances, chances


def test_three_hundred_comparisons_tell_which_form_suffices_and_how_often() -> None:
    """Where the shipped score is the same for all, what was learned ranks calls as the truth does, and counts as it."""
    learned = learn(*calls(300, -0.5, 1.5, 1)[:3])
    scores, form, _, true = calls(500, -0.5, 1.5, 2)
    chances, spreads = learned.chances(scores, form)

    assert np.corrcoef(chances, true)[0, 1] > 0.75
    assert abs(chances.mean() - true.mean()) < 0.06
    assert learned.gain > 0.05
    assert ((spreads > 0.1) & (spreads < 1.2)).all()


def test_more_comparisons_are_surer_and_few_change_little() -> None:
    """Nothing compared of a kind leaves the shipped score near; the deviation falls with what was compared."""
    few, many = (learn(*calls(count, 0.85, 0.0, 3)[:3]) for count in (5, 400))
    scores, form, _, _ = calls(50, 0.85, 0.0, 4)

    assert np.abs(few.chances(scores, form)[0] - 0.7).mean() < 0.15
    assert many.chances(scores, form)[1].mean() < few.chances(scores, form)[1].mean()


def test_other_work_is_soon_judged_by_itself() -> None:
    """After four hundred calls where small models suffice, a hundred where they do not bring the level down."""
    before, after = calls(400, 2.0, 0.0, 5), calls(100, -2.0, 0.0, 6)
    columns = [np.concatenate(both) for both in zip(before, after, strict=True)]
    scores, form, _, true = calls(200, -2.0, 0.0, 7)

    assert abs(learn(*columns[:3]).chances(scores, form)[0].mean() - true.mean()) < 0.12


def test_what_was_learned_is_kept_small_and_for_its_version() -> None:
    """What is stored says nearly the same, in 17 kB; scores of another version are not judged by it."""
    learned = learn(*calls(150, 0.0, 1.0, 8)[:3])
    data = packed(learned, "one")
    found = unpacked(data, "one")
    scores, form, _, _ = calls(50, 0.0, 1.0, 9)

    assert found is not None and len(data) < 18_000 and unpacked(data, "other") is None
    assert (found.comparisons, found.gain) == (150, learned.gain)
    for again, first in zip(found.chances(scores, form), learned.chances(scores, form), strict=True):
        assert again == pytest.approx(first, abs=2e-3)


def compared(count: int, by_form: float, *, has_form: bool = True) -> list[Comparison]:
    scores, form, suffices, _ = calls(count, 0.85, by_form, 17)
    forms = [one.astype(np.float16).tobytes() if has_form else None for one in form]
    rows = zip(scores.tolist(), suffices.tolist(), forms, strict=True)
    return [Comparison(score, found, 1, 2, False, form) for score, found, form in rows]


def test_a_team_has_scores_of_its_own_only_where_they_foretell_better() -> None:
    """Too few comparisons, those without form, and those that form says nothing of leave the shipped score."""
    assert own_scores(compared(300, 1.5), "v") is not None
    assert own_scores(compared(LEAST_COMPARISONS - 1, 1.5), "v") is None
    assert own_scores(compared(300, 1.5, has_form=False), "v") is None
    assert own_scores(compared(300, 0.0), "v") is None


def test_a_team_score_reads_requests_as_they_were_compared() -> None:
    """Short questions sufficed and lists did not: so it is said of others, with an interval about the chance; a request
    without a text has the shipped score."""
    short = [chat("auto", f"What is the capital of country {number}?") for number in range(80)]
    lists = [chat("auto", f"- {number}\n- fix: it;\n- why?\n" * 6) for number in range(80)]
    asked: list[tuple[Request, bool]] = [(request, True) for request in short] + [(each, False) for each in lists]
    shipped = Complexity.load()
    found = [Comparison(shipped(one), suffices, 1, 2, False, packed_form(one)) for one, suffices in asked[::-2]]
    data = own_scores(found, shipped.version)
    assert data is None  # 80 are too few
    found = [Comparison(shipped(one), suffices, 1, 2, False, packed_form(one)) for one, suffices in asked]
    data = own_scores(found, shipped.version)
    learned = None if data is None else unpacked(data, shipped.version)
    assert learned is not None
    score = TeamScore(shipped, learned)
    easy, hard = chat("auto", "What is the capital of Peru?"), chat("auto", "- 7\n- mend: that;\n- how?\n" * 5)
    low, high = score.interval(easy)

    assert score(easy) > 0.7 > 0.5 > score(hard)
    assert low < score(easy) < high
    assert score(chat("auto", " ")) == shipped(chat("auto", " "))
