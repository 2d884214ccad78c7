# What a replica's time costs, reckoned by hand.

from __future__ import annotations

HOUR = 3_600_000_000  # microseconds


def price_of_time(microseconds: int, gpus: int, gpu_hour_nanousd: int) -> int:
    """Return what so much time of a replica costs, in nano-dollars, rounded once, half up."""
    return (2 * microseconds * gpus * gpu_hour_nanousd + HOUR) // (2 * HOUR)
