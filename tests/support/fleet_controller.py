# `tollgate fleet up`, whose replicas are paced_replica.py: python -m tests.support.fleet_controller FILE local|ray

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from gateway.config.file import load_settings
from gateway.placing.controller import run_controller
from gateway.placing.local import LocalPlacer
from gateway.placing.placer import Placer
from tests.support.ray_cluster import MACHINE_HOST

WORDS = ("-m", "tests.support.paced_replica")


def main(file: Path, placer: str) -> int:
    """Control until a signal comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    settings = load_settings(file, os.environ)

    def opened() -> Placer:
        if placer == "local":
            return LocalPlacer(settings.data_dir / "fleet", (sys.executable, *WORDS))
        import ray

        from gateway.placing.on_ray import RayPlacer

        ray.init = partial(ray.init, _node_ip_address=MACHINE_HOST)  # else the head's, where that is on this machine
        return RayPlacer(WORDS)

    return run_controller(file, settings, opened)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
