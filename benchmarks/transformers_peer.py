# The peer of the engine's benchmark: transformers' own continuous batching, on the same device, at the same shape with
# random weights, for the same requests in the same run.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from benchmarks.roofline import Request


def run_peer(
    config: dict[str, Any], requests: Sequence[Request], device: torch.device, budget: float
) -> tuple[list[int], float]:
    """Return how many tokens each reply got within ``budget`` seconds, and the seconds. Building takes time beside it.

    Raises what transformers raises: its interface moves with its versions.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    shape = AutoConfig.for_model(**config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        torch.set_default_dtype(dtype)
        try:
            model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
        finally:
            torch.set_default_dtype(torch.float32)
    generation = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0,
        max_new_tokens=max(request.output for request in requests),
    )  # fmt: skip
    batching = ContinuousBatchingConfig() if device.type == "cuda" else _small(ContinuousBatchingConfig)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=5
    ) as manager:
        return _ask(manager, requests, config["vocab_size"], budget)


def _small(make: Any) -> Any:
    size = next(field.name for field in fields(make) if field.name in ("page_size", "block_size"))  # 5.23 and 5.17
    return make(num_blocks=64, max_batch_tokens=64, **{size: 16})


def _ask(manager: Any, requests: Sequence[Request], vocab: int, budget: float) -> tuple[list[int], float]:
    made = [0] * len(requests)
    started = time.perf_counter()
    for number, request in enumerate(requests):
        prompt = [token % vocab for token in request.prompt]
        manager.add_request(prompt, request_id=str(number), max_new_tokens=request.output, eos_token_id=-1)
    waiting = len(requests)
    while waiting and (left := budget - (time.perf_counter() - started)) > 0:
        output = manager.get_result(timeout=min(left, 0.5))
        if output is not None:
            if output.error:
                raise RuntimeError(output.error)
            made[int(output.request_id)] = len(output.generated_tokens)
            waiting -= 1
        elif not manager.is_running():
            raise RuntimeError("transformers stopped")
    seconds = time.perf_counter() - started
    for state in list(manager.batch_processor.scheduler.active_requests.values()) if waiting else ():
        made[int(state.request_id)] = len(state.generated_tokens)  # of replies that are cut
    return made, seconds
