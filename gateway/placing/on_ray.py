# Replicas on the machines of a Ray cluster: a detached actor for each, which supervises one engine process there. Ray
# finds a machine and counts its GPUs. Tokens never pass through it: an engine announces an address of its own. Every
# machine has `tollgate[engine,ray]` of the controller's version.

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from gateway.placing.local import DEVICES
from gateway.placing.placer import CannotPlace, Order
from gateway.run.processes import spawn

NAMESPACE = "tollgate"
MODULE = ("-m", "gpu_backend")
AWAY = (RayError, RuntimeError, ConnectionError, TimeoutError)  # what Ray raises where the cluster does not answer


class EngineSupervisor:
    """The actor of one replica. It ends with its engine, and takes it along when it is killed."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], gpus: int) -> None:
        devices = {} if gpus else {DEVICES: ""}  # else Ray has said which
        with suppress(PermissionError):  # Ray's workers run at niceness 15: heartbeats of a busy machine would be late
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._child = spawn([sys.executable, *words], log=None, env={**os.environ, **environment, **devices})
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def check_health(self) -> int:
        """Return the engine's process id. Ray raises where it, or its machine, is gone."""
        return self._child.pid

    def stop(self) -> None:
        """Let the engine drain, and end."""
        self._child.send_signal(signal.SIGTERM)

    def _end_with_it(self) -> None:
        self._child.wait()
        os._exit(0)  # a thread cannot end an actor otherwise; its GPUs are free at once


class RayPlacer:
    """Starts actors in the cluster of ``$RAY_ADDRESS``, else in that of this machine. ``words``: of a Python.

    It is opened in the main thread.
    """

    def __init__(self, words: Sequence[str] = MODULE) -> None:
        self._words = words
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            ray.init("auto", namespace=NAMESPACE, log_to_driver=False, ignore_reinit_error=True)
        except AWAY as exc:
            token = "RAY_AUTH_MODE=token where it asks for one"  # Ray turns it on by itself for no address
            raise CannotPlace(f"no Ray cluster answers; `ray start --head`, or $RAY_ADDRESS, {token}: {exc}") from exc
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # with Ray's own a process aborts at SIGTERM

    def start(self, order: Order) -> None:
        """Ask for an actor. Where no machine has room it waits for one, and counts as a replica that starts."""
        place: Any = {"num_gpus": order.gpus, "num_cpus": 1, "max_restarts": 0, "lifetime": "detached"}
        actor = ray.remote(EngineSupervisor).options(name=order.name, namespace=NAMESPACE, **place)
        try:
            actor.remote([*self._words, *order.arguments], dict(order.environment), order.gpus)
        except (*AWAY, ValueError) as exc:
            raise CannotPlace(f"Ray takes no actor: {exc}") from exc

    def names(self) -> Collection[str]:
        """Return the replicas whose actors live, or wait for a machine."""
        try:
            return {one["name"] for one in ray.util.list_named_actors(True) if one["namespace"] == NAMESPACE}
        except AWAY as exc:
            raise CannotPlace(f"Ray does not say what runs: {exc}") from exc

    def stop(self, name: str) -> None:
        """Let an engine drain, and end. One that waits for a machine still is killed later."""
        with suppress(ValueError, *AWAY):
            ray.get_actor(name, NAMESPACE).stop.remote()

    def kill(self, name: str) -> None:
        """End an actor, and with it its engine."""
        with suppress(ValueError, *AWAY):
            ray.kill(ray.get_actor(name, NAMESPACE))
