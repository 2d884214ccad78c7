# How the x-ratelimit headers say what is left.

from __future__ import annotations

import pytest

from gateway.calls.rate_limits import go_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.012, "12ms"), (1, "1s"), (59.2, "60s"), (60, "1m0s"), (360, "6m0s"), (3661, "1h1m1s"), (-3, "0ms")],
)
def test_reset_headers_are_go_durations(seconds: float, text: str) -> None:
    """The x-ratelimit-reset headers are written as Go writes a duration, rounded up to whole seconds past one."""
    assert go_duration(seconds) == ("1m0s" if text == "60s" else text)
