# The GPU's checks, run on the CPU under the conditions of a bare GPU image, so that they cannot rot between two cards.

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_rows, gpu
from benchmarks.gpu import GRACE, longer_tables
from benchmarks.roofline import TINY_SHAPES, Request, shared_workload
from benchmarks.transformers_peer import run_peer
from gpu_backend.kernels import reference
from tests.gpu import generation, operations
from tests.gpu.check import outcome_of
from tests.gpu.plain import PlainModel
from tests.support.tiny_model import TinyModel, write_tiny_model

pytestmark = pytest.mark.timeout(400)  # the first test that needs ``shown`` waits for all of it
ROOT = Path(__file__).parents[3]
# What every Python process under a bare image does first: none of these can be imported. transformers, the peer, can.
BARE = """
import sys
ABSENT = (
    "msgspec", "litestar", "uvicorn", "pytest", "hypothesis", "redis", "asyncpg", "sqlalchemy", "structlog",
    "openai", "anthropic", "sklearn", "llguidance", "jinja2", "pydantic", "prometheus_client",
)
sys.modules.update(dict.fromkeys(ABSENT))
"""


def run_bare(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments, and all processes that it starts, with little more than torch installed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(BARE)
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
        )


def test_bare_processes_lack_the_web_stack_in_every_generation() -> None:
    """What the other tests rely on: a process that one starts is as bare as itself."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'litestar', 'version'])"
    done = run_bare("timeit", "-n1", "-r1", child)

    assert done.returncode == 0 and "No module named litestar" in done.stderr


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what `make gpu` writes, of tiny shapes, on the CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    done = run_bare("benchmarks.gpu", "--tiny", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def part(shown: Path, name: str) -> Any:
    """Return what one part of it found."""
    facts = json.loads(next(shown.glob("gpu-tiny-on-the-cpu-*.json")).read_text())
    assert facts["problems"] == {} and facts["torch"] == torch.__version__
    return facts["parts"][name]


def test_every_check_passes_on_a_bare_cpu(tmp_path: Path) -> None:
    """The suite runs without test runner and web stack, with fresh shapes, and passes on the CPU too: what stands there
    in plain torch, and every Triton kernel by its interpreter.
    """
    done = run_bare("tests.gpu", "--tiny", "--out", str(tmp_path))
    outcomes = json.loads((tmp_path / "checks.json").read_text())["outcomes"]

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(outcomes) >= 49 and not [outcome for outcome in outcomes if not outcome["passed"]]


@pytest.mark.soak
def test_every_long_check_passes_on_a_bare_cpu() -> None:
    """The whole suite again, with what takes long where kernels are interpreted."""
    done = run_bare("tests.gpu", "--device", "cpu")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_every_kernel_has_a_row(shown: Path) -> None:
    """Each is measured beside the ceilings, interpreted."""
    rows = part(shown, "kernels")["rows"]

    assert len({row["kernel"] for row in rows}) == len(rows) == 21


@pytest.mark.soak
def test_every_workload_has_a_row(shown: Path) -> None:
    """The engine's table is whole: our own rows beside the device's roofline, a new process, and the peer."""
    found, (peer,) = part(shown, "engine tiny"), part(shown, "transformers tiny")["rows"]
    *rows, started = found["rows"]
    decodes = [f"decode, batch {size}" for size in (1, 2, 4)]

    assert [row["workload"] for row in rows] == ["one stream", "shared", "64 streams", *decodes]
    assert not [row["note"] for row in rows if row["note"]]
    assert (peer["engine"], peer["workload"]) == ("transformers", "shared")
    assert started["figures"]["first_token_s"] > started["figures"]["ttft_s"] > 0
    assert all(row["output_tokens"] == row["planned_tokens"] and row["share_of_measured"] > 0 for row in rows)
    assert all(0 < row["figures"]["gpu_busy"] <= 1 for row in rows)
    assert found["measured"]["bandwidth"] > 0 < found["measured"]["flops"]


@pytest.mark.soak
def test_peer_answers_the_same_requests() -> None:
    """transformers' continuous batching makes every token that it is asked for; its interface may move."""
    requests = [Request(tuple(range(3, 9 + i)), 4 + i) for i in range(3)]

    made, seconds = run_peer(TINY_SHAPES["tiny"], requests, torch.device("cpu"), 60.0)

    assert made == [4, 5, 6] and seconds > 0


@pytest.mark.soak
def test_all_of_it_is_one_page(shown: Path) -> None:
    """Hardware, versions and date stand above the checks and both tables."""
    text = next(shown.glob("*.md")).read_text()

    assert len(list(shown.iterdir())) == 2
    assert all(word in text for word in (torch.__version__, "triton", "date 20", "PASS", "Measured peaks"))
    assert text.count("| Tollgate |") == 7 and text.count("| transformers |") == 1
    assert "| attention, decode |" in text and "| a step |" in text


@pytest.mark.soak
def test_a_step_is_profiled_kernel_by_kernel(shown: Path) -> None:
    """Where the time of a step of decodes goes is told for every batch, the most expensive first."""
    shares = part(shown, "profile")["shares"]

    for batch in (1, 2):
        step, *kernels = [share for share in shares if share["batch"] == batch]
        assert step["kernel"] == "a step" and step["microseconds"] > 0 and len(kernels) > 5
        assert [k["microseconds"] for k in kernels] == sorted((k["microseconds"] for k in kernels), reverse=True)


@pytest.mark.soak
def test_longer_tables_run_tiny_shapes_on_a_bare_cpu(tmp_path: Path) -> None:
    """Fixed lengths, ways of batching, a long prompt, paces, drafts, few bits, the same bits: all have figures."""
    done = run_bare("benchmarks.engine_rows", "--tiny", "--out", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert len(rows) == 19 and not any(row["cut"] or row["note"] for row in rows)
    whole, chunked = (row for row in rows if "of prompt" in row["workload"])
    assert min(whole["figures"]["ttft_long_ms"], chunked["figures"]["gap_max_ms"]) > 0
    (paced,) = (row["figures"] for row in rows if "requests/s" in row["workload"])
    assert 0 < paced["ttft_p50_ms"] <= paced["ttft_p99_ms"]
    drafts = [row["figures"] for row in rows if "hold" in row["workload"]]
    tokens_a_step = [figures["tokens_a_step"] for figures in drafts]
    assert tokens_a_step[0] == 1 and tokens_a_step[-1] > 4 and tokens_a_step == sorted(tokens_a_step)
    assert 0 <= drafts[-1]["break_even_share"] <= 2
    few_bits = [row["figures"] for row in rows if row["workload"].startswith(("w8a8", "fp8 and"))]
    assert len(few_bits) == 4 and all(it["weights_gb"] > 0 < it["decode_ms_per_step"] for it in few_bits)
    assert [row["workload"] for row in rows if "cost" in row["figures"]] == ["shared, same bits whatever the batch"]


def test_each_of_the_longer_tables_is_a_part_of_its_own() -> None:
    """Each published row has a part to itself, and every part finds exactly its group."""
    for tiny in (True, False):
        names = [part.only for part in longer_tables(tiny)]
        assert [[other for other in engine_rows.groups(tiny) if name in other] for name in names] == [
            [n] for n in names
        ]
    published = [name for name in names if name.startswith("published")]
    assert len(published) == 14 and "published Llama-3.3-70B, 20000 in, 2000 out" in published
    assert all(part.longest + 2 * GRACE < 600 for part in longer_tables(False))


@pytest.mark.soak
def test_chosen_parts_end_in_a_file_of_that_name(tmp_path: Path) -> None:
    """`make gpu-rows PART=paced` runs what has the word in its name; a word that no part has is refused."""
    done = run_bare("benchmarks.gpu", "--rows", "--only", "paced", "--tiny", "--out", str(tmp_path))
    none = run_bare("benchmarks.gpu", "--rows", "--only", "nonsense", "--tiny", "--out", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    (facts,) = (json.loads(file.read_text()) for file in tmp_path.glob("gpu-rows-paced-tiny-*.json"))
    assert list(facts["parts"]) == ["paced tiny"] and not facts["problems"]
    assert none.returncode == 2 and "no part has 'nonsense'" in none.stderr


def test_without_a_device_the_suite_skips_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without CUDA is no failure."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert (gpu.main(), capsys.readouterr().out) == (0, "SKIPPED: no CUDA device\n")


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


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.soak), torch.bfloat16])
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


@pytest.mark.parametrize("architecture", [pytest.param("LlamaForCausalLM", marks=pytest.mark.soak), "Qwen3ForCausalLM"])
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
