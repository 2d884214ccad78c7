# python -m gpu_backend.simulate --trace FILE --gpus N: how this engine would serve a recorded workload, with no device.

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu_backend.simulate.hardware import DEVICES, PRECISIONS, REPLAYED, copy_seconds, resident_tokens, step_cost
from gpu_backend.simulate.replica import HostMemory, replay
from gpu_backend.simulate.report import Promise, Report, make_report
from gpu_backend.simulate.traces import read_trace, share_out
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import read_step_cost

MEMORY_SHARE = 0.9  # of the devices, as the engine takes it


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, replay, print; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        report = simulate(options)
    except (OSError, ValueError, KeyError) as error:
        print(f"simulate: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(report.as_dict()) if options.json else report.text())  # noqa: T201
    return 0


def simulate(options: argparse.Namespace) -> Report:
    """Replay what the command line asks for. Raises ``ValueError`` for what cannot be simulated."""
    requests = read_trace(Path(options.trace), options.start, options.seconds, options.seed)[: options.requests]
    requests = share_out(requests, options.tenants, options.batch_share, options.seed)
    requests = [replace(request, arrival=request.arrival / options.speed) for request in requests]
    if not requests:
        raise ValueError("that stretch of the trace holds no request")
    model, device, gpus = REPLAYED[options.model], DEVICES[options.device], options.gpus_per_replica
    weight_bytes = PRECISIONS[options.precision]
    replicas, rest = divmod(options.gpus, gpus)
    if rest or not replicas:
        raise ValueError(f"--gpus {options.gpus} is no multiple of --gpus-per-replica {gpus}")
    tokens = resident_tokens(model, device, gpus, weight_bytes, memory_share=MEMORY_SHARE)
    cost = (
        read_step_cost(Path(options.step_cost)) if options.step_cost else step_cost(model, device, gpus, weight_bytes)
    )
    config = engine_config(
        model="",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        max_waiting=options.max_waiting,
        step_stretch=options.step_stretch,
        step_cost=cost,
    )
    num_blocks = options.num_kv_blocks or tokens // options.block_size
    if not num_blocks:
        raise ValueError(f"{options.model} leaves no room for a KV cache on {gpus} x {options.device}")
    block_bytes = options.block_size * model.kv_bytes_per_token()
    host = HostMemory(
        int(options.kv_offloading_size * 2**30 / block_bytes), copy_seconds(model, device, gpus, options.block_size)
    )
    served = replay(requests, config, cost, num_blocks, replicas, options.max_tokens, options.deadline_ms, host)
    return make_report(served, Promise(options.ttft, options.gap), config.steps.max_num_seqs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_backend.simulate",
        description="Replay a trace through the real scheduler under a virtual clock.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE", help="Azure's .csv, Mooncake's .jsonl.gz or ServeGen's .tar.xz")
    add("--start", type=float, default=0.0, metavar="S", help="seconds of the trace to leave out")
    add("--seconds", type=float, default=math.inf, metavar="S", help="seconds of the trace to replay")
    add("--requests", type=int, metavar="N", help="replay no more than these")
    add("--speed", type=float, default=1.0, metavar="X", help="arrivals come that much faster")
    add("--gpus", type=int, default=1, metavar="N", help="in all")
    add("--gpus-per-replica", type=int, default=1, metavar="N", help="that share every layer of the model")
    add("--model", choices=REPLAYED, default="llama-8b", help="whose size counts")
    add("--device", choices=DEVICES, default="h200", help="whose memory and speed count")
    add("--precision", choices=PRECISIONS, default="bf16", help="of the weights; the KV cache is bf16")
    add(
        "--step-cost",
        metavar="FILE",
        help="JSON with the five numbers of a measured step cost",
    )
    add("--num-kv-blocks", type=int, metavar="N", help="what the devices hold if not given")
    add("--kv-offloading-size", type=float, default=0.0, metavar="GIB", help="host memory behind a replica's KV cache")
    add("--block-size", type=int, default=16, metavar="N", help="tokens in a block")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="replies that run at once")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens a step")
    add("--max-waiting", type=int, default=4096, metavar="N", help="requests of a tier in the queue")
    add("--step-stretch", type=float, default=1.5, metavar="X", help="a step with prompts in it over its decodes alone")
    add("--max-tokens", type=int, default=2048, metavar="N", help="what every request declares")
    add("--deadline-ms", type=int, metavar="MS", help="x-deadline-ms of every request")
    add("--tenants", type=int, default=4, metavar="N", help="among whom requests without one are shared out")
    add("--batch-share", type=float, default=0.0, metavar="P", help="of the requests that are batch work")
    add("--ttft", type=float, default=1.0, metavar="S", help="promised seconds to the first token")
    add("--gap", type=float, default=0.2, metavar="S", help="promised longest pause between tokens")
    add("--seed", type=int, default=0, help="of what is drawn")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
