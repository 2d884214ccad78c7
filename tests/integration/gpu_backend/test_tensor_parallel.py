# One model computed by two processes: the replies are those of one process, token by token, and each process has about
# half of the weights and half of the KV cache.

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.config import EngineConfig
from gpu_backend.engine.messages import Generate, Ready
from gpu_backend.engine.process import EngineProcess
from gpu_backend.engine.runner import Runner
from gpu_backend.engine.sequence import SamplingParams
from gpu_backend.models.config import UnsupportedModel, load_model_config
from tests.support.engine import answer_all, expect_short_replies, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

WISH = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, frequency_penalty=0.2)
COMMANDS = [
    Generate(str(i), tuple((7 * i + j * j) % 256 for j in range(length)), replace(WISH, seed=i))
    for i, length in enumerate((1, 15, 14, 33))
]


def test_two_processes_reply_as_one_does(tmp_path: Path) -> None:
    """With prompts in chunks, steps launched before the last tokens are known, and sequences preempted."""
    folder = write_tiny_model(tmp_path, TinyModel("Qwen2ForCausalLM", attention_bias=True, intermediate_size=128))
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_kv_blocks": 7, "async_scheduling": True,
        "host_kv_bytes": 100_000, "kv_cache_dtype": "fp8",
    }  # fmt: skip
    alone = _replies(model_loop(folder, **settings))

    loop = model_loop(folder, **settings, tensor_parallel_size=2)
    expect_short_replies(loop)
    runner = loop.runner
    assert isinstance(runner, Runner)
    try:
        together = _replies(loop)
    finally:
        runner.close()

    assert together == alone
    assert loop.scheduler.num_preemptions > 0
    (whole,) = Runner(EngineConfig(str(folder), "cpu", **settings), load_model_config(folder)).bytes_of_ranks
    for weights, cache in runner.bytes_of_ranks:
        assert cache == whole[1] / 2
        assert whole[0] / 2 < weights < 0.7 * whole[0], "embedding and head are on both, all else is cut"


def test_what_does_not_divide_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, TinyModel())

    with pytest.raises(UnsupportedModel, match="num_kv_heads is 2, which 4 ranks do not divide"):
        Runner(EngineConfig(str(folder), "cpu", tensor_parallel_size=4), load_model_config(folder))


@pytest.mark.soak
def test_engine_ends_when_a_rank_is_lost(tmp_path: Path) -> None:
    """Whoever waits for it learns so at once, instead of waiting for ever."""
    folder = write_tiny_model(tmp_path, TinyModel(), with_tokenizer=True)
    engine = EngineProcess.start(EngineConfig(str(folder), "cpu", tensor_parallel_size=2))
    try:
        assert isinstance(engine.receive()[0], Ready)
        (follower,) = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
        os.kill(int(follower), signal.SIGKILL)

        with pytest.raises(EOFError):
            while True:
                engine.receive()
    finally:
        engine.stop()


def _replies(loop: Any) -> dict[Any, tuple[int, ...]]:
    return {key: tuple(answer.token_ids) for key, answer in answer_all(loop, COMMANDS).items()}
