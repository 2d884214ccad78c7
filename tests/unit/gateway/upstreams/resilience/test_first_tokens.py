"""What is forecast of a target's first token, and how long that is believed."""

from __future__ import annotations

import pytest

from gateway.upstreams.resilience.first_tokens import BELIEVED, NEWEST, FirstTokens
from router.catalog.targets import TargetHealth
from tests.support.clock import SetClock
from tests.unit.router.examples import catalog, model


def test_newer_streams_count_more_and_old_ones_are_forgotten() -> None:
    """A target that nobody has streamed from for a minute is unknown again; the others stay."""
    clock = SetClock()
    first_tokens = FirstTokens(clock)
    one, other = catalog(model("one"), model("other")).targets()
    first_tokens.note(one, 1.0)
    first_tokens.note(one, 0.5)
    clock.move(BELIEVED / 2)
    first_tokens.note(other, 0.2)
    known = dict(first_tokens.beside({}))
    clock.move(BELIEVED / 2 + 1)
    later = dict(first_tokens.beside({}))
    clock.move(BELIEVED)

    assert known[one.key].first_token_ms == pytest.approx(1000 - NEWEST * 500)
    assert later.keys() == {other.key}
    assert first_tokens.beside({}) == {}


def test_who_is_in_trouble_stays_so() -> None:
    """A forecast does not close a breaker."""
    first_tokens = FirstTokens(SetClock())
    [target] = catalog(model("one")).targets()
    first_tokens.note(target, 0.1)

    assert first_tokens.beside({target.key: TargetHealth(is_open=True)})[target.key].is_open
