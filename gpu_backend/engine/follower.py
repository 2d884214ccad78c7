# python -m gpu_backend.engine.follower RANK FILE|HOST:PORT PARENT: one of the ranks behind the first; see ranks.py. It
# computes its part of every step, and samples nothing.

from __future__ import annotations

import pickle
import signal
import sys

from gpu_backend.engine.process import die_with
from gpu_backend.engine.torch_import import import_torch
from gpu_backend.models.config.model import load_model_config


def main(rank: int, meeting: str, parent: int) -> int:
    """Compute what the first rank says until there is no more of it, or no more first rank."""
    die_with(parent)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    config = pickle.load(sys.stdin.buffer) if "/" in meeting else None  # from the process that started this one
    import_torch()
    import torch

    from gpu_backend.execution.ranks import CONFIG, Ranks, meet_at
    from gpu_backend.execution.runner import Runner

    store = None
    if config is None:
        store = meet_at(meeting, is_first=False)
        config = pickle.loads(store.get(CONFIG))
    if config.device.num_threads is not None:
        torch.set_num_threads(config.device.num_threads)
    width, stages = config.device.tensor_parallel_size, config.device.pipeline_parallel_size
    ranks = Ranks(rank, width, stages, store or meeting)
    runner = Runner(config, load_model_config(config.checkpoint.folder), ranks)
    while (told := ranks.tell(None)) is not None:
        runner.follow(told)
    ranks.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
