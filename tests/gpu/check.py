# A named check: a function of device, precision and dice that returns its figures, or raises ``Failed`` with them.

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class Failed(Exception):
    """A rule does not hold; the message has the figures."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a check runs: on what, in which precision, and with which dice."""

    device: torch.device
    dtype: torch.dtype
    dice: random.Random

    def randn(self, *shape: int) -> Tensor:
        """Return normal numbers, rounded to the precision; drawn where they are needed, for there may be many."""
        generator = torch.Generator(self.device).manual_seed(self.dice.getrandbits(62))
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def generator(self) -> torch.Generator:
        """Return the CPU's, freshly seeded."""
        return torch.Generator().manual_seed(self.dice.getrandbits(62))


@dataclass(frozen=True, slots=True)
class Check:
    """A rule, and the precisions in which it is held against the device."""

    name: str
    run: Callable[[Setting], str]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    long: tuple[torch.dtype, ...] = ()  # of them, on a CPU


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check came to."""

    name: str
    passed: bool
    figures: str
    seconds: float
    left_out: bool = False  # neither passed nor failed: there was no time

    def line(self) -> str:
        """Return it as one line for people."""
        word = "LEFT" if self.left_out else "PASS" if self.passed else "FAIL"
        return f"{word}  {self.name:<58} {self.seconds:6.2f} s  {self.figures}"


def name_of(check: Check, dtype: torch.dtype) -> str:
    """Return the name of a check in one precision."""
    return f"{check.name}, {str(dtype).removeprefix('torch.')}"


def outcome_of(check: Check, dtype: torch.dtype, device: torch.device, seed: int) -> Outcome:
    """Run one check; whatever it raises is a failure, never the end of the suite."""
    name = name_of(check, dtype)
    setting = Setting(device, dtype, random.Random(f"{seed} {name}"))
    started = time.perf_counter()
    try:
        figures, passed = check.run(setting), True
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a launch that went wrong is this check's, not the next one's
    except Failed as error:
        figures, passed = str(error), False
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        figures, passed = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})", False
    return Outcome(name, passed, figures, time.perf_counter() - started)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ‖out − expected‖ / ‖expected‖ in float64, on the CPU; infinite for anything that is not a number."""
    wide, reference = out.detach().cpu().double(), expected.detach().cpu().double()
    if wide.shape != reference.shape:
        raise Failed(f"the shape is {tuple(wide.shape)}, not {tuple(reference.shape)}")
    error = ((wide - reference).norm() / reference.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def require(holds: bool, otherwise: str) -> None:
    """Raise ``Failed`` with that message unless the rule holds."""
    if not holds:
        raise Failed(otherwise)
