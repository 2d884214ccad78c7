# Replicas on the machines of a Ray cluster: a detached actor for each, which supervises one engine process there. Ray
# finds a machine and counts its GPUs. Tokens never pass through it: an engine announces an address of its own. Every
# machine has `tollgate[engine,ray]` of the controller's version.

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gateway.fleet.rollouts import read_name
from gateway.placing.local import DEVICES
from gateway.placing.placer import CannotPlace, Order
from gateway.run.processes import free_port, spawn

NAMESPACE = "tollgate"
MODULE = ("-m", "gpu_backend")
LOOKS_EVERY, PATIENCE = 1.0, 30.0  # seconds between looks at other ranks, and for one to answer
IDLE_FOR = 10.0  # seconds for which a group without an actor may be one that another controller just asks for
PARENT = "PARENT"  # stands for the process id of an actor
AWAY = (RayError, RuntimeError, ConnectionError, TimeoutError)  # what Ray raises where the cluster does not answer


class ProcessSupervisor:
    """An actor that ends with its process, and takes it along when it is killed."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], gpus: int) -> None:
        devices = {} if gpus else {DEVICES: ""}  # else Ray has said which
        with suppress(PermissionError):  # Ray's workers run at niceness 15: heartbeats of a busy machine would be late
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        words = [str(os.getpid()) if word == PARENT else word for word in words]
        self._child = spawn([sys.executable, *words], log=None, env={**os.environ, **environment, **devices})
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def check_health(self) -> int:
        """Return the process id. Ray raises where it, or its machine, is gone."""
        return self._child.pid

    def stop(self) -> None:
        """Let an engine drain, and end."""
        self._child.send_signal(signal.SIGTERM)

    def _end_with_it(self) -> None:
        self._child.wait()
        os._exit(0)  # a thread cannot end an actor otherwise; its GPUs are free at once


class EngineSupervisor(ProcessSupervisor):
    """The actor of one replica. Of several ranks each other one has an actor of its own, in the same placement group,
    which Ray ends with this one; and this one ends with any of them."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], gpus: int, ranks: int = 1) -> None:
        self._others: list[Any] = []
        if ranks > 1:
            address = f"{ray.util.get_node_ip_address()}:{free_port()}"
            words = [*words, "--ranks-meet-at", address]
            group = ray.util.get_current_placement_group()
            for rank in range(1, ranks):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
                actor = ray.remote(ProcessSupervisor).options(num_gpus=gpus, num_cpus=1, scheduling_strategy=place)
                follower = ["-m", "gpu_backend.engine.follower", str(rank), address, PARENT]
                self._others.append(actor.remote(follower, dict(environment), gpus))
        super().__init__(words, environment, gpus)
        if self._others:
            threading.Thread(target=self._end_with_them, daemon=True).start()

    def _end_with_them(self) -> None:
        while True:
            for one in self._others:
                try:
                    ray.get(one.check_health.remote(), timeout=PATIENCE)
                except ActorDiedError:
                    self._child.kill()  # the sums of the step under way would never come
                    return
                except RayError:
                    pass  # no answer now
            time.sleep(LOOKS_EVERY)


class RayPlacer:
    """Starts actors in the cluster of ``$RAY_ADDRESS``, else in that of this machine. ``words``: of a Python.

    It is opened in the main thread. ``fleet``: the Redis of its controllers; replicas of fleets that have others are in
    namespaces of their own.
    """

    def __init__(self, words: Sequence[str] = MODULE, fleet: str = "") -> None:
        self._words = words
        self.namespace = f"{NAMESPACE}-{sha256(fleet.encode()).hexdigest()[:12]}" if fleet else NAMESPACE
        self._has_groups = True  # an earlier controller's may be there
        self._with_actors = set[str]()  # groups that had an actor at some look,
        self._without: dict[str, float] = {}  # and since when those that have none have none (monotonic seconds)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            ray.init("auto", namespace=self.namespace, log_to_driver=False, ignore_reinit_error=True)
        except AWAY as exc:
            token = "RAY_AUTH_MODE=token where it asks for one"  # Ray turns it on by itself for no address
            raise CannotPlace(f"no Ray cluster answers; `ray start --head`, or $RAY_ADDRESS, {token}: {exc}") from exc
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # with Ray's own a process aborts at SIGTERM

    def start(self, order: Order) -> None:
        """Ask for an actor. Where no machine has room it waits for one, and counts as a replica that starts. Engines of
        several ranks wait for room for all of them, on one machine where that is to be had."""
        gpus, rest = divmod(order.gpus, order.ranks)
        if rest:
            raise CannotPlace(f"{order.ranks} ranks have {order.gpus} GPUs: gpus is a multiple of them")
        place: Any = {"num_gpus": gpus, "num_cpus": 1, "max_restarts": 0, "lifetime": "detached"}
        try:
            if order.ranks > 1:
                bundles = [{"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})] * order.ranks
                group = ray.util.placement_group(bundles, strategy="PACK", name=order.name, lifetime="detached")
                place["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0)
                self._has_groups = True
            actor = ray.remote(EngineSupervisor).options(name=order.name, namespace=self.namespace, **place)
            actor.remote([*self._words, *order.arguments], dict(order.environment), gpus, order.ranks)
        except (*AWAY, ValueError) as exc:
            raise CannotPlace(f"Ray takes no actor: {exc}") from exc

    def names(self) -> Collection[str]:
        """Return the replicas whose actors live, or wait for a machine."""
        try:
            names = {one["name"] for one in ray.util.list_named_actors(True) if one["namespace"] == self.namespace}
            if self._has_groups:
                self._free_groups(names)
            return names
        except AWAY as exc:
            raise CannotPlace(f"Ray does not say what runs: {exc}") from exc

    def stop(self, name: str) -> None:
        """Let an engine drain, and end. One that waits for a machine still is killed later."""
        with suppress(ValueError, *AWAY):
            ray.get_actor(name, self.namespace).stop.remote()

    def kill(self, name: str) -> None:
        """End an actor, and with it its engine."""
        with suppress(ValueError, *AWAY):
            ray.kill(ray.get_actor(name, self.namespace))

    def _free_groups(self, names: Collection[str]) -> None:
        """Give the room back that engines of several ranks had. Another controller, whose turn just ended, may be about
        to start one: its group has no actor yet."""
        now, table = time.monotonic(), ray.util.placement_group_table().values()
        left = {one["name"] for one in table if one["state"] != "REMOVED" and read_name(one["name"]) is not None}
        self._with_actors = (self._with_actors | {*names}) & left
        self._without = {name: self._without.get(name, now) for name in left - {*names}}
        for name, since in self._without.items():
            if name in self._with_actors or now - since > IDLE_FOR:
                self._without[name] = now  # where it is another fleet's
                with suppress(ValueError):
                    ray.util.remove_placement_group(ray.util.get_placement_group(name))
        self._has_groups = bool(left)
