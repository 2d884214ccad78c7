# What the card of the shipped model says of thresholds.

from __future__ import annotations

from router.complexity.card import card_curve


def test_the_cards_thresholds_rise_in_cost_and_quality() -> None:
    """From the small model alone to the large one alone; each threshold sends more calls to the large model."""
    points = card_curve()
    columns = [[point.quality for point in points], [point.share_large for point in points]]

    assert len(points) > 7
    assert (points[0].share_large, points[-1].share_large) == (0, 1)
    assert columns == [sorted(set(column)) for column in columns]
    assert points[0].share_right < points[-2].share_right <= points[-1].share_right < 1
