# Several processes that compute one model together, each on a device of its own: the first has the step loop, and tells
# the others each step's plan. They talk by torch.distributed: gloo on the CPU, NCCL between GPUs.
#
# Ranks beside each other share a pipeline's stage, whose layers they cut. Stages are numbered from the last: rank 0 has
# the last layers, so that tokens are sampled where the step loop is. It tells the first stage which tokens come next.
#
# They meet in a file, whose processes the first one starts, or at an address of it, where others start them.

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_backend.step.config import EngineConfig
from gpu_backend.step.messages import Sleep, WakeUp
from gpu_backend.step.plan import StepPlan

CONFIG = "config"  # the first one's, pickled, where they meet at an address
STARTING = timedelta(minutes=10)
FOR_EVER = timedelta(days=365)  # followers wait for work, however long


class Ranks:
    """This process's place among them: ``stages`` times ``width`` ranks.

    Every method is called by all ranks, in the same order; ``add``, ``receive`` and ``send`` by those of a stage. A
    rank that fails in between can never go on with the others, which wait for it.
    """

    def __init__(self, rank: int, width: int, stages: int, meeting: str | Any) -> None:
        """``meeting``: the file, or what ``meet_at`` returned."""
        self.rank = rank
        self.size = size = width * stages
        self.width = width
        self.stages = stages
        self.stage = stages - 1 - rank // width  # 0 has the first layers
        self.place = rank % width  # within the stage
        self._is_apart = False
        self._meeting = meeting
        store = dist.FileStore(meeting, size) if isinstance(meeting, str) else meeting  # type: ignore[attr-defined]
        store.set_timeout(STARTING)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOR_EVER)
        groups = [dist.new_group(list(range(first, first + width))) for first in range(0, size, width)]
        self._stage_group = groups[rank // width]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this rank compute for itself what is never read: it adds, receives, sends and shares nothing."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of the parts of the stage's ranks, the same bits on each; ``part`` is written over."""
        if not self._is_apart:
            dist.all_reduce(part, group=self._stage_group)
        return part

    def receive(self, states: Tensor) -> None:
        """Fill it with what the stage before sends."""
        if self._is_apart:
            states.zero_()
        else:
            dist.recv(states, self.rank + self.width)

    def send(self, states: Tensor) -> None:
        """Give the next stage hidden states."""
        if not self._is_apart:
            dist.send(states, self.rank - self.width)

    def share(self, tensor: Tensor) -> None:
        """Give all ranks the first one's numbers."""
        if not self._is_apart:
            dist.broadcast(tensor, 0)

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return min(self.gather(number))

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank has, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def tell(self, told: StepPlan | Sleep | WakeUp | None) -> StepPlan | Sleep | WakeUp | None:
        """Return what the first rank tells all ranks to do; None: there will be no more."""
        box = [_bare(told) if isinstance(told, StepPlan) else told]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def leave(self) -> None:
        """Part from the others."""
        dist.destroy_process_group()
        if self.rank == 0 and isinstance(self._meeting, str):
            shutil.rmtree(Path(self._meeting).parent, ignore_errors=True)


def start_ranks(config: EngineConfig) -> Ranks:
    """Start the others as processes that die with this one, and meet them; this is the first.

    It ends at once when one of them is lost: the sums of the step under way would never come. Where they meet at an
    address they are another's to start, and to end with this one.
    """
    width, stages = config.device.tensor_parallel_size, config.device.pipeline_parallel_size
    if config.device.ranks_meet_at is not None:
        store = meet_at(config.device.ranks_meet_at, is_first=True)
        known = replace(config, transfer=replace(config.transfer, kv_transfer_secret=""))  # it is told in the clear
        store.set(CONFIG, pickle.dumps(known))
        return Ranks(0, width, stages, store)
    meeting_file = str(Path(tempfile.mkdtemp(prefix="tollgate-ranks-")) / "meeting")
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    for rank in range(1, config.device.num_ranks):
        child = subprocess.Popen(
            [sys.executable, "-m", "gpu_backend.engine.follower", str(rank), meeting_file, str(os.getpid())],
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.PIPE,
        )
        assert child.stdin is not None
        with child.stdin as pipe:
            pickle.dump(config, pipe)
        threading.Thread(target=_end_with, args=(rank, child), daemon=True).start()
    return Ranks(0, width, stages, meeting_file)


def meet_at(address: str, *, is_first: bool) -> Any:
    """Return what ranks meet in at HOST:PORT, where the first one listens."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"), int(port), is_master=is_first, timeout=STARTING, wait_for_workers=False
    )


def _end_with(rank: int, child: subprocess.Popen[bytes]) -> None:
    if status := child.wait():
        print(f"gpu_backend: rank {rank} ended with status {status}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)


def _bare(plan: StepPlan) -> StepPlan:
    """Leave out what only sampling asks for: that is the first rank's alone."""
    steps = (replace(step, constraint=None, text=b"") for step in plan.sequences)
    return replace(plan, sequences=tuple(steps))
