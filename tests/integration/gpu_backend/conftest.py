# One thread for torch: tests share their cores, and tiny models gain nothing from a second one.

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> None:
    """Keep every test to one core."""
    torch.set_num_threads(1)
