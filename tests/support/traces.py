# Public traces, where somebody has put them: $TOLLGATE_DATA, or a folder of shared data beside the checkout.

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TOLLGATE_DATA") or Path(__file__).parents[3] / "shared" / "data")
AZURE_CHAT = "azure/AzureLLMInferenceTrace_conv.csv"
AZURE_CODE = "azure/AzureLLMInferenceTrace_code.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
SERVEGEN = "servegen-m-small.tar.xz"


def trace_path(name: str) -> Path:
    """Return where a trace lies; without it the test is skipped."""
    path = DATA / "traces" / name
    if not path.exists():
        pytest.skip(f"SKIPPED: {name} is not here; set TOLLGATE_DATA to the folder that has traces/{name}")
    return path
