# A small catalogue and requests to choose for.

from __future__ import annotations

from typing import Any

from billing.core.money import to_nano
from billing.core.prices import Price
from protocol.chat import ChatRequest, Message
from router import Capability, Catalog, Endpoint, ModelSpec, Target
from router.catalog.catalog import AutoRoute

CHAT = frozenset({Capability.CHAT})
EVERYTHING = frozenset(Capability)


def model(name: str, provider: str = "us-only", dollars: str = "1.00", **fields: Any) -> ModelSpec:
    """A model that serves chat; output costs four times what input costs."""
    price = Price(input=to_nano(dollars), output=to_nano(f"{4 * float(dollars):.4f}"))
    known = {"upstream_model": name, "context": 8_000, "max_output": 1_000, "capabilities": CHAT, "price": price}
    return ModelSpec(name=name, provider=provider, **known | fields)


def catalog(
    *models: ModelSpec,
    small: tuple[str, ...] = (),
    large: tuple[str, ...] = (),
    quality: float = 0.8,
    fallbacks: dict[str, tuple[str, ...]] | None = None,
    aliases: dict[str, str] | None = None,
) -> Catalog:
    """A catalogue of these models over three providers: one endpoint, two regions, two replicas."""
    endpoints = {
        "us-only": (Endpoint("us", "https://one.example/v1"),),
        "us-eu": (Endpoint("us", "https://us.example/v1"), Endpoint("eu", "https://eu.example/v1")),
        "own": (Endpoint("local", "http://gpu-0/v1"), Endpoint("local", "http://gpu-1/v1")),
    }
    auto = {"auto": AutoRoute(small=small, large=large, quality=quality)} if small or large else {}
    return Catalog({m.name: m for m in models}, endpoints, auto, fallbacks or {}, aliases or {})


def chat(name: str = "auto", text: str = "Hello", **fields: Any) -> ChatRequest:
    """A chat request of one user turn."""
    return ChatRequest(model=name, messages=(Message(role="user", content=text),), **fields)


def names(targets: tuple[Target, ...]) -> list[str]:
    """The targets as ``model@host``."""
    return [f"{t.model.name}@{t.endpoint.base_url.split('//')[1].split('.')[0].split('/')[0]}" for t in targets]
