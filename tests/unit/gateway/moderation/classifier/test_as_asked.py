"""The classifier that ships, on prompts that are in no data set and no fit."""

from __future__ import annotations

import pytest

from gateway.moderation.classifier.classifier import FLAGGED
from tests.support.asked import ATTACKS, CARE, CODES, EVERYDAY, HARMS, ORDERS, asked
from tests.support.judging import WAYS, Judge
from tests.support.letters import MAILS, PAGES, letters, orders, with_orders
from tools.moderation_training.texts.work import work_texts
from tools.moderation_training.texts.written import written_prompts

ASK = "Summarize this for me:\n\n"


@pytest.fixture(scope="module")
def shipped() -> Judge:
    """The one that ships, as gateways have it: with the encoder."""
    if len(WAYS) == 1:
        pytest.skip("the extra `reader` is not installed: make setup")
    return Judge(WAYS[-1])


def test_none_of_them_is_fitted() -> None:
    """Nor in other capitals or with another full stop."""
    fitted = {prompt.lower().rstrip(" .?") for prompt, _ in written_prompts()}

    judging = [prompt for prompts in (EVERYDAY, ORDERS, CODES, CARE, ATTACKS, HARMS) for prompt in asked(prompts)]
    assert not fitted & {prompt.lower().rstrip(" .?") for prompt in judging}


@pytest.mark.parametrize(("prompts", "least"), [(ATTACKS, 0.7), (HARMS, 0.5)], ids=["attacks", "harms"])
def test_most_attacks_and_requests_for_harm_are_found(shipped: Judge, prompts: str, least: float) -> None:
    """Though none came from where its training rows came from."""
    texts = asked(prompts)
    missed = [text for text in texts if max(shipped.score(text).values()) < FLAGGED]

    assert len(missed) <= (1 - least) * len(texts), missed


@pytest.mark.parametrize(
    ("prompts", "most"),
    [(EVERYDAY, 0.04), (ORDERS, 0.01), (CODES, 0.06), (CARE, 0.12)],
    ids=["everyday", "orders", "codes", "care"],
)
def test_few_everyday_prompts_are_flagged_that_sound_like_them(shipped: Judge, prompts: str, most: float) -> None:
    """Orders about an answer's form, questions about crime and illness, and words that frighten alone; short orders
    with data behind them; and, more than is right, codes to be read and questions about care."""
    flagged = [text for text in asked(prompts) if max(shipped.score(text).values()) >= FLAGGED]

    assert len(flagged) <= most * len(asked(prompts)), flagged


def test_no_letter_is_fitted() -> None:
    """Nor an order to an assistant."""
    fitted = {text.lower() for text, _ in (*written_prompts(), *work_texts())}

    assert not fitted & {text.lower() for text in letters(MAILS) + letters(PAGES) + orders()}


def test_orders_to_an_assistant_are_found_in_letters(shipped: Judge) -> None:
    """In mails and web pages, pasted by a user. Both are full of orders to their readers, for which many are flagged:
    no more than are now."""
    flagged = [text for text in letters(MAILS) + letters(PAGES) if shipped.score(ASK + text)["attack"] >= FLAGGED]
    missed = [text for text in with_orders() if shipped.score(ASK + text)["attack"] < FLAGGED]

    assert len(flagged) <= 0.6 * len(letters(MAILS) + letters(PAGES)), flagged
    assert len(missed) <= 0.15 * len(with_orders()), missed
