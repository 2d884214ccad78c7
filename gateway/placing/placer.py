# What starts and stops replicas, as the controller asks for it, and what it is told of one. A replica's name says whose
# it is and what it is, so that a heartbeat alone tells that to a controller that began later.

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.core.settings import EngineSpec, Rollout
from gateway.fleet.rollouts import read_name

RANKS = ("--tensor-parallel-size", "--pipeline-parallel-size")  # the engine's flags, whose product they are
INSTANCE_ID = "--instance-id"  # the engine's flag that carries the name


OF_MODEL = ("--model", "--served-model-name", "--fleet-pool", INSTANCE_ID, "--warm-up")  # what a load says anew
LOADS = "--allow-model-loading"  # the engine's flag: while it sleeps
BESIDE_MODEL = ("--registry", "--tokenizer")  # flags by which a model is more than its folder: a load cannot say them


class CannotPlace(Exception):
    """A replica cannot be started; the message says why."""


class Order(Struct, frozen=True, kw_only=True):
    """A replica to start."""

    name: str
    arguments: tuple[str, ...]  # of ``python -m gpu_backend``
    environment: Mapping[str, str]  # beside that of the machine
    inherited: tuple[str, ...] = ()  # names of the controller's environment that reach a process of its machine, too
    gpus: int
    ranks: int = 1  # processes that compute together, by its arguments


class Placer(Protocol):
    """Starts and stops replicas somewhere. It may block for a moment: it is asked in a thread, one thing at a time.

    Where it cannot, opening it, ``start`` and ``names`` raise ``CannotPlace``.
    """

    def start(self, order: Order) -> None:
        """Start a replica, which outlives the controller."""

    def names(self) -> Collection[str]:
        """Return the replicas that run, also those that an earlier controller started."""

    def stop(self, name: str) -> None:
        """Let a replica drain, and end."""

    def kill(self, name: str) -> None:
        """End a replica at once."""


def revision_of(engine: EngineSpec) -> str:
    """Return a name of all that a replica is."""
    return sha256(msgspec.json.encode(engine)).hexdigest()[:12]


def new_name(pool: str, revision: str) -> str:
    """Return a name for another replica."""
    return f"{pool}.{revision}.{secrets.token_hex(4)}"


def order_for(name: str, engine: EngineSpec, rollout: Rollout, environment: Mapping[str, str]) -> Order:
    """Return what to start as a replica of that name. ``environment``: secrets, which no argument shows."""
    pool, _ = read_name(name) or ("", "")
    given = {
        "--fleet-pool": pool,
        INSTANCE_ID: name,
        "--port": "0",
        "--warm-up": msgspec.json.encode(engine.warm_up).decode(),
        "--drain-seconds": f"{rollout.drain:g}",
    }
    words = [word for pair in given.items() for word in pair]
    arguments = ("--model", engine.model, *engine.arguments, *words)
    more = engine.environment
    ranks = prod(max(1, _said(engine.arguments, flag)) for flag in RANKS)
    return Order(name=name, arguments=arguments, environment=environment, inherited=more, gpus=engine.gpus, ranks=ranks)


def may_be_loaded(order: Order) -> bool:
    """Whether a process that sleeps may be told to become that replica: it and its model's folder are all there is."""
    flags = [word.partition("=")[0] for word in order.arguments if word.startswith("--")]
    return LOADS in flags and not any(len(flag) > 2 and one.startswith(flag) for flag in flags for one in BESIDE_MODEL)


def load_of(order: Order) -> tuple[dict[str, Any], Order]:
    """Return what a process that sleeps is told to become that replica, and what it cannot be told: that has to be so
    already."""
    told, rest, flag = dict[str, Any](), [], None
    for word in order.arguments:
        said, has_value, value = word.partition("=")
        if flag is not None:
            told[flag[2:].replace("-", "_")], flag = word, None
        elif (flag := next((one for one in OF_MODEL if said[:2] == "--" and one.startswith(said)), None)) is None:
            rest.append(word)
        elif has_value:
            told[flag[2:].replace("-", "_")], flag = value, None
    told["warm_up"] = msgspec.json.decode(told.get("warm_up", "[]"))
    return told, replace(order, name="", arguments=tuple(rest))


def _said(arguments: Sequence[str], flag: str) -> int:
    """Return the number that arguments give a flag, the last time; 0: none."""
    words = [*(word for each in arguments for word in each.split("=", 1)), ""]
    found = [after for word, after in pairwise(words) if word == flag]
    return int(found[-1]) if found and found[-1].isdecimal() else 0
