# What a short loan of a GPU must not lose: a row that fails is told of, and those before and behind it are there.

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import engine, kernels
from benchmarks.driving import build_loop, drive
from benchmarks.engine_table import Row
from benchmarks.roofline import TINY_SHAPES, Request
from gpu_backend.hardware.roofline import HardwarePeaks

CPU = torch.device("cpu")


def test_row_that_fails_loses_no_other() -> None:
    """It is a row itself, which says why, and those that came before are kept."""

    def rows() -> Iterator[Row]:
        yield Row("a", "first")
        raise RuntimeError("an illegal memory access")

    kept = [*engine.surviving("a", "second", rows()), *engine.surviving("a", "third", iter([Row("a", "third")]))]

    assert [(row.workload, row.failed) for row in kept] == [("first", False), ("second", True), ("third", False)]
    assert kept[1].note == "failed: RuntimeError: an illegal memory access"


def test_kernel_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in its run nor while its inputs are made; and when the time is over, what is left out says so."""

    def cases(*_: object) -> Iterator[kernels.Case]:
        yield kernels.Case("bad", "x", lambda: torch.zeros(2) @ torch.zeros(3), 8.0)
        yield kernels.Case("good", "x", lambda: torch.zeros(2) + 1, 8.0)
        raise MemoryError

    for name in ("_attention", "_between_products", "_products", "_sampling"):
        monkeypatch.setattr(kernels, name, cases)
    peaks = HardwarePeaks(1e9, 1e9), None
    rows = list(kernels._rows({"tiny": TINY_SHAPES["tiny"]}, "", peaks, CPU, float("inf")))
    late = list(kernels._rows({"tiny": TINY_SHAPES["tiny"]}, "", peaks, CPU, 0.0))

    assert [row.kernel for row in rows] == ["bad", "good", "failed"] * 4
    assert rows[1].microseconds > 0 and "RuntimeError" in rows[0].note and "MemoryError" in rows[2].note
    assert [row.note for row in late] == ["left out: no time"] * 4


def test_engine_is_empty_after_a_row_that_failed() -> None:
    """The next row's requests do not run beside those of one that was given up."""
    loop = build_loop(TINY_SHAPES["tiny"], CPU)
    step, steps = loop.step, iter(range(3))

    def break_down() -> object:
        next(steps)
        return step()

    loop.step = break_down  # type: ignore[method-assign, assignment]
    with pytest.raises(StopIteration):
        drive(loop, [Request((1, 2, 3), 50)], 60.0)
    loop.step = step  # type: ignore[method-assign]

    assert drive(loop, [Request((4, 5), 6)], 60.0).made == [6]
