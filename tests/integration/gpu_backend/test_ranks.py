# One model computed by several processes: the replies are those of one process, token by token, and each process has
# its share of the weights and of the KV cache: half of every layer, or half of the layers.

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from gateway.run.processes import free_port
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import Generate, Sleep, SleepAnswer, WakeUp
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import answer_all, draft_from, expect_short_replies, model_loop
from tests.support.engine_server import running_engine_server
from tests.support.tiny_model import TinyModel, write_tiny_model

Replies = dict[Any, tuple[int, ...]]
WISH = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, frequency_penalty=0.2)
PLAIN = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9)
COMMANDS = [
    Generate(str(i), tuple((7 * i + j * j) % 256 for j in range(length)), replace(WISH, seed=i))
    for i, length in enumerate((1, 15, 14, 33))
]
# At the end, alone: what graphs draw.
COMMANDS += [replace(command, request_id=f"plain {i}", sampling=PLAIN) for i, command in enumerate(COMMANDS[:3])]
MODEL = TinyModel("Qwen2ForCausalLM", attention_bias=True, intermediate_size=128, num_layers=3)
# With an MLP in the first layer, and an expert beside the others that every token goes through.
MIXTURE = TinyModel("Glm4MoeForCausalLM", intermediate_size=128, num_layers=3, num_experts=6)
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_kv_blocks": 7, "host_kv_bytes": 150_000,
    "kv_cache_dtype": "fp8",
}  # fmt: skip
OVERLAP: dict[str, Any] = {"async_scheduling": True, "cuda_graphs": True}
DRAFTS: dict[str, Any] = {
    "speculative_method": "ngram", "num_speculative_tokens": 3, "cuda_graphs": True,
    "step_cost": StepCost(fixed=1.0, weights=0.0, token=0.0, context=0.0, pair=0.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("width", "stages", "more"),
    [
        (2, 1, OVERLAP | {"enable_expert_parallel": True}),
        (1, 2, DRAFTS),
        pytest.param(2, 1, OVERLAP, marks=pytest.mark.soak),
        pytest.param(2, 1, DRAFTS, marks=pytest.mark.soak),
        pytest.param(1, 2, OVERLAP | {"ranks_meet_at": f"127.0.0.1:{free_port()}"}, marks=pytest.mark.soak),
        pytest.param(1, 2, OVERLAP, marks=pytest.mark.soak),
        pytest.param(2, 2, OVERLAP, marks=pytest.mark.soak),
        pytest.param(2, 2, DRAFTS, marks=pytest.mark.soak),
        pytest.param(1, 3, {"async_scheduling": True, "batch_invariant": True}, marks=pytest.mark.soak),
    ],
)
def test_several_processes_reply_as_one_does(
    width: int, stages: int, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, graphs, sequences preempted; steps launched before the last tokens are known, or drafts.

    They have slept before, and leave no file behind.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = write_tiny_model(tmp_path, MIXTURE if "enable_expert_parallel" in more else MODEL)
    invariant = {"batch_invariant": more.get("batch_invariant", False)}
    alone = _replies(model_loop(folder, **SETTINGS, **invariant))
    if "ranks_meet_at" in more:  # where another starts them
        words = ("1", more["ranks_meet_at"], str(os.getpid()))
        subprocess.Popen([sys.executable, "-m", "gpu_backend.engine.follower", *words])

    loop = model_loop(folder, **SETTINGS, **more, tensor_parallel_size=width, pipeline_parallel_size=stages)
    expect_short_replies(loop)
    if "speculative_method" in more:
        draft_from(loop, alone, 0.8)
    runner = loop.runner
    assert isinstance(runner, Runner)
    try:
        woken = [*loop.handle(Sleep(1)), *loop.handle(WakeUp(2))]
        together = _replies(loop)
    finally:
        runner.close()

    assert woken == [SleepAnswer(1), SleepAnswer(2)]
    assert together == alone
    assert loop.scheduler.running.num_preempted > 0
    if more.get("cuda_graphs"):
        assert runner.graphs is not None and runner.graphs._graphs
    if loop.scheduler.speculator is not None:
        assert loop.scheduler.speculator.num_held > 20
    _check_parts(folder, runner, width, stages)
    assert not list(tmp_path.glob("tollgate-ranks-*"))


def _check_parts(folder: Path, runner: Runner, width: int, stages: int) -> None:
    whole = Runner(engine_config(str(folder), device="cpu", **SETTINGS), load_model_config(folder)).parts_of_ranks[0]
    parts = runner.parts_of_ranks
    assert len(parts) == width * stages
    layers = [layer for part in reversed(parts[::width]) for layer in part[0]]
    assert layers == list(whole[0]), "the last layers are the first rank's"
    cache = sum(part[2] for part in parts[::width])
    assert cache * width == whole[2] and all(part[2] == whole[2] * len(part[0]) // width // 3 for part in parts)
    if stages == 1:
        assert all(whole[1] / width < part[1] < 0.7 * whole[1] for part in parts), "embedding and head are on both"
    else:
        table = 4 * MODEL.vocab_size * MODEL.hidden_size
        assert sum(part[1] for part in parts[::width]) < (whole[1] if width == 1 else 0.7 * whole[1]) + table
        assert max(part[1] for part in parts) < 0.75 * whole[1], "embedding and head are on one stage each"


def test_what_cannot_be_is_refused_before_any_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not divide, and what the GPU's kernels cannot do."""
    folder = write_tiny_model(tmp_path, TinyModel())
    monkeypatch.setattr("gpu_backend.execution.ranks.start_ranks", lambda _: pytest.fail("a process was started"))

    with pytest.raises(UnsupportedModel, match="num_kv_heads is 2, which 4 ranks do not divide"):
        Runner(engine_config(str(folder), device="cpu", tensor_parallel_size=4), load_model_config(folder))
    with pytest.raises(UnsupportedModel, match=r"this model has no mixture of experts; leave it out"):
        sharing = engine_config(str(folder), device="cpu", tensor_parallel_size=2, enable_expert_parallel=True)
        Runner(sharing, load_model_config(folder))
    with pytest.raises(UnsupportedModel, match="2 layers are too few for 3 pipeline stages"):
        Runner(engine_config(str(folder), device="cpu", pipeline_parallel_size=3), load_model_config(folder))
    monkeypatch.setattr("gpu_backend.execution.runner._choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8, minor=0))
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype cannot be fp8"):
        rounding = engine_config(str(folder), tensor_parallel_size=2, kv_cache_dtype="fp8")
        Runner(rounding, load_model_config(folder))


@pytest.mark.soak
@pytest.mark.parametrize("model", [MODEL, TinyModel("Qwen3NextForCausalLM", num_layers=3)], ids=["keys", "states"])
def test_replies_go_on_when_a_rank_is_lost(model: TinyModel, tmp_path: Path) -> None:
    """The process that waits for it ends at once, instead of for ever, and the next one says the same tokens."""
    bodies = [
        {"prompt": list(command.prompt_token_ids), "max_tokens": 30, "seed": i, "temperature": 0.8 * (i % 2)}
        for i, command in enumerate(COMMANDS[:4])
    ]
    more = {"model": "tiny", "stream": True, "ignore_eos": True, "return_token_ids": True}
    folder, told = write_tiny_model(tmp_path, model, with_tokenizer=True), threading.Semaphore(0)
    with (
        running_engine_server(folder, "--tensor-parallel-size", "2") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
        ThreadPoolExecutor(len(bodies)) as threads,
    ):

        def reply(body: dict[str, Any]) -> list[int]:
            tokens: list[int] = []
            with client.stream("POST", "/v1/completions", json=body | more) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        tokens += [one for choice in json.loads(line[6:])["choices"] for one in choice["token_ids"]]
                        told.release()
            return tokens

        undisturbed = list(threads.map(reply, bodies))
        while told.acquire(blocking=False):
            pass
        disturbed = [threads.submit(reply, body) for body in bodies]
        assert all(told.acquire(timeout=60) for _ in range(20))
        (follower,) = server.engine().children()
        follower.kill()

        assert [each.result() for each in disturbed] == undisturbed
        assert {len(tokens) for tokens in undisturbed} == {30}
        assert client.get("/health").json()["restarts"] == 1


@pytest.mark.soak
def test_rank_that_cannot_make_a_graph_keeps_no_other_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds out while each computes for itself; all go on without graphs, and say the same."""
    folder = write_tiny_model(tmp_path, MODEL)
    alone = _replies(model_loop(folder, **SETTINGS))
    loop = model_loop(folder, **SETTINGS, **OVERLAP, tensor_parallel_size=2)
    runner = loop.runner
    assert isinstance(runner, Runner) and runner.graphs is not None

    def fail(size: tuple[int, int]) -> None:
        raise torch.OutOfMemoryError("no room for a graph")

    runner.graphs._compute = fail  # type: ignore[method-assign]
    try:
        together = _replies(loop)
    finally:
        runner.close()

    assert together == alone
    assert not runner.graphs._graphs and capsys.readouterr().err.count("no room for a graph") == 1


# One rank fails in the middle of a step that the other computes as well.
FAILS_ALONE = """
import os, sys
from pathlib import Path
from gpu_backend.step.plan import DeviceLost
from tests.support.engine import answer_all, greedy, model_loop

loop = model_loop(Path(sys.argv[1]), tensor_parallel_size=2)
answer_all(loop, [greedy("before", range(5), 3)])
out = loop.runner._model.layers[1].attention.out
type(out).__call__ = lambda self, x: 1 // 0
loop.handle(greedy("a", range(5)))
try:
    loop.step()
except DeviceLost as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.soak
def test_rank_that_fails_alone_ends_the_engine(tmp_path: Path) -> None:
    """The others wait for its part of that step, and would take the next one's for it."""
    folder = write_tiny_model(tmp_path, TinyModel(), with_tokenizer=True)

    command = [sys.executable, "-c", FAILS_ALONE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert "rank 0 failed while others wait for its part (ZeroDivisionError" in done.stdout, done.stderr


def _replies(loop: EngineLoop) -> Replies:
    return {key: tuple(answer.token_ids) for key, answer in answer_all(loop, COMMANDS).items()}
