# Which calls are held back: drawn from those that small models answer, whatever was said of them.

from __future__ import annotations

import random
from typing import Any

import numpy as np

from gateway.answering.call import Call
from gateway.clock import Clock
from gateway.held_back.taker import NOT_TAKEN, Taker
from protocol.chat import ChatRequest, Message
from router import Catalog, Endpoint, Target, Wish
from router.catalog import AutoRoute, HeldBack
from router.complexity import Complexity
from tests.support.house import model

WORDS = [
    "which",
    "prove",
    "12",
    "x",
    "=",
    "capital",
    "of",
    "the",
    "sum",
    "not",
    "except",
    "7/8",
    "law",
    "why\n",
    "A.",
    "def",
]


def call(text: str) -> Call:
    """A call of somebody who waits."""
    request = ChatRequest(model="auto", messages=(Message(role="user", content=text),))
    caller: Any = None  # the draw knows none
    return Call(
        request_id="r",
        caller=caller,
        endpoint="chat.completions",
        request=request,
        wish=Wish(),
        created_at=0,
        started=0,
    )


def test_what_is_compared_is_drawn_without_regard_to_the_score() -> None:
    """A share of the calls is taken, and scores are among them as they are among all: what is measured is unbiased."""
    held_back = HeldBack(share=0.3, budget_nanousd=10**9)
    auto = AutoRoute(small=("small",), large=("large",), held_back=held_back)
    catalog = Catalog({name: model(name) for name in ("small", "large")}, {}, {"auto": auto}, {}, {})
    background: Any = None  # nothing ends here, so that nothing is noted
    dice = random.Random(4)
    taker = Taker(catalog, background, background, Clock(), dice.random)
    target = Target(catalog.models["small"], Endpoint("us", "https://small.example"))
    complexity, calls = (
        Complexity.load(),
        [call(" ".join(dice.choices(WORDS, k=dice.randint(3, 40)))) for _ in range(2_000)],
    )

    taken = np.array([taker.watch(each, target) is not NOT_TAKEN for each in calls])
    scores = np.array([complexity(each.request) for each in calls])

    count = taken.sum()
    assert abs(count - 600) < 4 * np.sqrt(2_000 * 0.3 * 0.7)
    assert scores.std() > 0.05
    assert abs(scores[taken].mean() - scores.mean()) < 4 * scores.std() / np.sqrt(count)
    assert abs(scores[taken].std() / scores.std() - 1) < 0.15
