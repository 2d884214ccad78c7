# The GPU's checks, run on the CPU under the conditions of a bare GPU image, so that they cannot rot between two cards.

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.roofline import shared_workload
from gpu_backend.kernels import reference
from tests.gpu import generation, operations
from tests.gpu.check import outcome_of
from tests.gpu.plain import PlainModel
from tests.support.tiny_model import TinyModel, write_tiny_model

ROOT = Path(__file__).parents[3]
# Runs a module as `python -m` does, where none of these can be imported.
BARE = """
import runpy, sys
ABSENT = {
    "msgspec", "litestar", "uvicorn", "httpx", "pytest", "hypothesis", "redis", "asyncpg", "sqlalchemy", "structlog",
    "openai", "anthropic", "sklearn", "transformers", "llguidance", "jinja2", "pydantic", "prometheus_client",
}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}: this is a bare image")
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_bare(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments where only torch and transformers' dependencies are installed."""
    return subprocess.run(
        [sys.executable, "-c", BARE, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def test_every_check_passes_on_a_bare_cpu() -> None:
    """The whole suite runs without test runner and web stack, with fresh shapes, and passes on the CPU too: what stands
    there in plain torch, and every Triton kernel by its interpreter.
    """
    done = run_bare("tests.gpu", "--device", "cpu")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") >= 43 and "FAIL" not in done.stdout


def test_without_a_device_the_suite_skips_and_says_so() -> None:
    """A machine without CUDA is no failure."""
    done = run_bare("tests.gpu")

    assert (done.returncode, done.stdout) == (0, "SKIPPED: no CUDA device\n"), done.stderr


def test_wrong_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that is off by a percent, or leaves one number unwritten, does not pass."""
    cpu, check = torch.device("cpu"), operations.CHECKS[0]
    right = reference.rms_norm

    monkeypatch.setattr(reference, "rms_norm", lambda x, weight, eps: right(x, weight, eps) * 1.02)
    off = outcome_of(check, torch.bfloat16, cpu, seed=1)
    monkeypatch.setattr(
        reference, "rms_norm", lambda x, weight, eps: right(x, weight, eps).index_fill_(0, torch.tensor(0), torch.nan)
    )
    unwritten = outcome_of(check, torch.bfloat16, cpu, seed=1)

    assert not off.passed and not unwritten.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lost_cache_entry_fails_every_engine_check(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loses one token's keys and values in each step does not pass, in the coarse precision either."""
    store, cpu = reference.store_kv, torch.device("cpu")

    def lose_one(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        store(key[:-1], value[:-1], kv_cache, slots[:-1])

    monkeypatch.setattr(reference, "store_kv", lose_one)
    judged = [
        check for check in generation.CHECKS if dtype in check.dtypes and check.run is not generation.seeded_replies
    ]
    outcomes = [outcome_of(check, dtype, cpu, seed=1) for check in judged]

    assert len(outcomes) == 4 and not any(outcome.passed for outcome in outcomes), outcomes


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_plain_pass_equals_transformers(architecture: str, tmp_path: Path) -> None:
    """The judge of the engine agrees with transformers about every logit."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path, TinyModel(architecture, seed=3))
    tokens = list(range(5, 60))

    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.tensor([tokens])).logits[0]
        out = PlainModel(folder).logits(tokens)

    torch.testing.assert_close(out, expected.double(), atol=1e-4, rtol=1e-4)


def test_shared_workload_is_the_published_one() -> None:
    """256 requests with the totals that the other engines' figures were measured with."""
    workload = shared_workload()

    assert len(workload) == 256
    assert sum(len(request.prompt) for request in workload) == 142_827
    assert sum(request.output for request in workload) == 133_966


def test_kernels_benchmark_runs_tiny_shapes_on_a_bare_cpu(tmp_path: Path) -> None:
    """Every kernel gets its row, interpreted."""
    done = run_bare("benchmarks.kernels", "--tiny", "--out", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert len({row["kernel"] for row in rows}) == len(rows) == 16


def test_benchmark_runs_a_tiny_shape_on_a_bare_cpu(tmp_path: Path) -> None:
    """The engine's benchmark writes its table and its figures where only torch is installed."""
    done = run_bare("benchmarks.engine", "--tiny", "--out", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert [row["workload"] for row in rows] == ["one stream", "shared"]
    assert all(row["output_tokens"] == row["planned_tokens"] and 0 < row["share_of_measured"] < 1 for row in rows)
