# The rows of the engine's benchmarks, and the two files they end in: JSON for programs, Markdown for readers.

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpu_backend.hardware.roofline import HardwarePeaks

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one shape. Shares are of the roofline of exactly the tokens that were made.

    A row that could not be measured says why in ``note``, and has no numbers.
    """

    model: str
    workload: str
    engine: str = "Tollgate"
    output_tokens: int = 0
    planned_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    share_of_measured: float | None = None
    share_of_datasheet: float | None = None
    figures: dict[str, float] = field(default_factory=dict)  # whatever else the workload is about, units in the names
    note: str = ""
    failed: bool = False  # by an error of Tollgate's

    @property
    def cut(self) -> bool:
        """Whether the row's time was over before its work was."""
        return self.output_tokens < self.planned_tokens

    def line(self) -> str:
        """Return the row as one of the table."""
        whole = f"cut: {self.output_tokens:,} of {self.planned_tokens:,}" if self.cut else "whole"
        shares = [
            "–" if share is None else f"{share:.1%}" for share in (self.share_of_measured, self.share_of_datasheet)
        ]
        figures = "; ".join(f"{name} {value:,.4g}" for name, value in self.figures.items())
        cells = (
            self.model, self.workload, self.engine, f"{self.tokens_per_second:,.1f}", *shares, f"{self.seconds:.2f}",
            self.note or whole, figures,
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def write(title: str, device: str, measured: HardwarePeaks, rows: Sequence[Row], folder: Path) -> Path:
    """Write TITLE-DEVICE-DATE.json and .md, and return the path of the latter."""
    now = datetime.now(UTC)
    about = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}, random weights"
    peaks = f"copy {measured.bandwidth / 1e12:.3f} TB/s, bf16 product {measured.flops / 1e12:.1f} TFLOP/s"
    if measured.fp8_flops:
        peaks += f", fp8 product {measured.fp8_flops / 1e12:.1f} TFLOP/s"
    table = [
        f"# {title.capitalize()} on {device}, {now:%Y-%m-%d}",
        f"\n{about}. Measured peaks: {peaks}.\n",
        "| shape | workload | engine | output tokens/s | of measured roofline | of datasheet | s | run | figures |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(row.line() for row in rows),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{title}-{re.sub('[^a-z0-9]+', '-', device.lower())}-{now:%Y-%m-%d}"
    write_whole(stem.with_suffix(".md"), "\n".join(table) + "\n")
    facts = {"device": device, "date": now.isoformat(timespec="seconds"), "about": about, "measured": asdict(measured)}
    lines = [{**asdict(row), "cut": row.cut} for row in rows]
    write_whole(stem.with_suffix(".json"), json.dumps({**facts, "rows": lines}, indent=1) + "\n")
    return stem.with_suffix(".md")


def write_whole(file: Path, text: str) -> None:
    """Write a file that is there whole or as it was, whenever it is read or this process ends."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)
