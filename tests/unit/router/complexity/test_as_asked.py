"""The complexity model that ships, on open chat that is in no data set and no fit."""

from __future__ import annotations

from itertools import product

from router.complexity.classifier import Complexity
from tests.support.asked import EASY, HARD, asked
from tools.complexity_training.written import written_prompts

DEFAULT = 0.8  # the quality of a route that names none


def test_none_of_them_is_fitted() -> None:
    """Nor in other capitals or with another full stop."""
    fitted = {prompt.text.lower().rstrip(" .?!") for prompt in written_prompts()}

    assert not fitted & {prompt.lower().rstrip(" .?!") for prompt in asked(EASY) + asked(HARD)}


def test_what_is_easy_scores_above_what_is_hard() -> None:
    """Most pairs are in order, most of what is easy goes to a small model and next to nothing of what is hard."""
    model = Complexity.load()
    easy, hard = ([model.score(prompt) for prompt in asked(prompts)] for prompts in (EASY, HARD))
    in_order = sum(one > other for one, other in product(easy, hard)) / (len(easy) * len(hard))

    assert in_order >= 0.85
    assert sum(score >= DEFAULT for score in easy) >= 0.75 * len(easy)
    assert sum(score >= DEFAULT for score in hard) <= 0.15 * len(hard)
