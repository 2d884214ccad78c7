# What the HTTP front is told at its start, beside the engine's own configuration.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from gpu_backend.kv_transfer.tcp import is_loopback
from gpu_backend.server.client.announcer import LEAST_SECRET, FleetSettings
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.config import EngineConfig, KvEventsConfig


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How the engine is reached. Raises ``ValueError`` for an address that would let strangers in."""

    engine: EngineConfig
    served_model_name: str
    instance_id: str  # how replicas are told apart in /load, before what is added at every start
    version: str | None = None  # of the model, where a registry has it
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the model's files by name, as far as known
    host: str = "127.0.0.1"
    port: int = 8100
    api_key: str | None = field(default=None, repr=False)  # demanded as a bearer token when set
    max_waiting: int = 4096  # requests without a first token, beyond which new ones are refused
    shared_prompts: str | None = None  # JSON file of system prompts whose cached blocks all tenants share
    drain_seconds: float = 5.0  # that running replies get after SIGTERM
    fleet: FleetSettings | None = None  # None: gateways know this engine by their configuration alone
    allow_model_loading: bool = False  # while it sleeps, from any folder that it can read
    warm_up: tuple[str, ...] = ()  # prompts that are answered before it is announced as active

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model: with its version, they are refused by any other."""
        name = self.served_model_name
        return (name,) if self.version is None else (name, f"{name}@{self.version}")

    def __post_init__(self) -> None:
        self._check_secret(self.host)
        if self.engine.transfer.kv_transfer_address is not None:
            self._check_secret(self.engine.transfer.host_and_port[0])
        if self.fleet is not None and self.fleet.secret == self.api_key:
            raise ValueError(
                "TOLLGATE_FLEET_SECRET is the engine's secret, which gateways send over the network: take another"
            )
        if self.allow_model_loading and (
            self.shared_prompts
            or self.engine.lora.num_slots
            or self.engine.speculation.has_model
            or self.engine.device.num_ranks > 1
        ):
            words = "engines of one process load others; adapters, shared prompts and drafts are one model's"
            raise ValueError(f"allow_model_loading: {words}")
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting is {self.max_waiting}; it is at least 1")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; it is 1 to 65535, or 0 for any free one")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds is {self.drain_seconds}; it is a number of seconds from 0 up")
        if self.warm_up and self.fleet is None:
            raise ValueError("warm_up says nothing without fleet_pool: it is before the first call of a gateway")
        if clash := {adapter.name for adapter in self.engine.lora.lora_modules} & {*self.names}:
            raise ValueError(f"lora_modules names an adapter {clash.pop()}, which is what the model itself is called")
        if not self.served_model_name:
            raise ValueError("served_model_name is empty; clients need a name for the model")

    def _check_secret(self, host: str) -> None:
        """Raise ``ValueError`` for an address that other machines reach without a secret, or with one to be guessed."""
        if is_loopback(host):
            return
        if not self.api_key:
            raise ValueError(
                f"listening on {host} lets other machines in: set TOLLGATE_ENGINE_SECRET (or --api-key), "
                "or listen on 127.0.0.1"
            )
        if len(self.api_key) < LEAST_SECRET:
            raise ValueError(
                f"listening on {host} lets other machines guess a secret of {len(self.api_key)} characters: "
                f"TOLLGATE_ENGINE_SECRET (or --api-key) needs {LEAST_SECRET}; make one with `openssl rand -hex 32`"
            )


def read_lora_modules(texts: Sequence[str]) -> tuple[Adapter, ...]:
    """Return the adapters of ``--lora-modules`` as vLLM takes them: NAME=PATH, or JSON with ``name`` and ``path``.

    Raises ``ValueError`` for what is neither.
    """
    return tuple(Adapter(number, *_lora_module(text)) for number, text in enumerate(texts, 1))


def _lora_module(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            said = msgspec.json.decode(text, type=dict[str, str])
        except msgspec.MsgspecError as exc:
            raise ValueError(f"lora_modules: {text[:100]} is no JSON object of texts: {exc}") from exc
        if unknown := said.keys() - {"name", "path", "base_model_name"}:
            raise ValueError(f"lora_modules: {', '.join(sorted(unknown))} is unknown; known are name and path")
        name, path = said.get("name", ""), said.get("path", "")
    if not (name and path):
        raise ValueError(f'lora_modules has {text[:100]!r}; an adapter is NAME=PATH, or {{"name": …, "path": …}}')
    return name, path


def read_kv_events(text: str) -> KvEventsConfig:
    """Return the settings that JSON says. Raises ``ValueError`` for what is none of them."""
    known = [each.name for each in fields(KvEventsConfig)]
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
        if unknown := said.keys() - set(known):
            raise ValueError(f"{', '.join(sorted(unknown))} is unknown; known are {', '.join(known)}")
        return msgspec.convert(said, KvEventsConfig)
    except (ValueError, msgspec.MsgspecError) as exc:
        raise ValueError(f"kv_events_config: {exc}") from exc
