# Which code reads what callers and upstreams send: found by looking through the packages, so that a new decoder,
# dialect, format, rule or pattern is measured as soon as it is there, or is missed by name.

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gateway.http.routes import HANDLERS
from protocol.chat import ChatReply, ChatRequest
from protocol.completions import CompletionReply, CompletionRequest
from protocol.embeddings import EmbeddingReply, EmbeddingRequest, RerankReply, RerankRequest
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionReply, TranscriptionRequest
from protocol.media.images import ImageReply, ImageRequest
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest

# Whose functions and patterns read it. What operators write (configuration, prices, commands) is theirs to bound.
PACKAGES = (
    *("protocol", "router", "gateway.calls", "gateway.inference", "gateway.idempotency.replay_buffer", "gateway.batch"),
    "gateway.cache.cached_answers",
    *("gateway.upstreams", "gateway.dialects", "gateway.http", "gateway.moderation", "gateway.shadow"),
    *("gateway.accounts.schemas", "gateway.accounts.auth", "gateway.egress", "gateway.outbox", "gateway.webhooks"),
    *("gateway.reports.csv_text", "gateway.reports.usage_period", "gpu_backend.server"),
)
NOT_OF_CALLERS = (  # they read what an operator says, or a name
    *("gateway.http.error_handler", "gateway.upstreams.resilience"),
    *("gpu_backend.server.checkpoint.model_source", "gpu_backend.server.checkpoint.model_registry"),
    *("gpu_backend.server.checkpoint.checkpoint", "gpu_backend.server.serving", "gpu_backend.server.settings"),
    "protocol.serving.listening",
    "protocol.serving.redis_client",
)

# What is read, by the type of a function's first parameter.
READ = frozenset(
    {str, bytes, ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, MessagesRequest, ResponsesRequest}
    | {
        ImageRequest,
        SpeechRequest,
        TranscriptionRequest,
        TranscriptionReply,
        RealtimeRequest,
        ChatReply,
        CompletionReply,
        EmbeddingReply,
        RerankReply,
        ImageReply,
    }
)


USES = re.compile(r"\b(\w+)\.(search|match|fullmatch|finditer|findall|sub|split)\(")


@functools.cache
def modules() -> tuple[types.ModuleType, ...]:
    """Return every module of the packages."""
    found = []
    for name in PACKAGES:
        package = importlib.import_module(name)
        found.append(package)
        for each in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            if not each.name.startswith(NOT_OF_CALLERS) and not each.name.endswith("__main__"):
                found.append(importlib.import_module(each.name))
    return tuple(module for module in found if not module.__name__.startswith(NOT_OF_CALLERS))


def patterns() -> dict[str, tuple[re.Pattern[Any], frozenset[str]]]:
    """Return every compiled pattern of the modules by its place, with the ways in which it is used."""
    used: dict[str, set[str]] = {}
    for module in modules():
        for name, way in USES.findall(Path(str(module.__file__)).read_text(encoding="utf-8")):
            used.setdefault(name, set()).add(way)
    found: dict[str, tuple[re.Pattern[Any], frozenset[str]]] = {}
    for module in modules():
        for name, pattern, way in _patterns_in(module):
            ways = (used.get(name, set()) | {way}) - {""}
            found.setdefault(f"{module.__name__}.{name}", (pattern, frozenset(ways or {"search"})))
    return found


def _patterns_in(module: types.ModuleType) -> Iterator[tuple[str, re.Pattern[Any], str]]:
    classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    for holder in (module, *classes):
        for name, value in vars(holder).items():
            if isinstance(value, re.Pattern):
                yield name, value, ""
            elif inspect.isbuiltin(value) and isinstance(
                value.__self__, re.Pattern
            ):  # NOT_PLAIN = re.compile(…).search
                yield name, value.__self__, value.__name__


def functions() -> dict[str, tuple[Callable[..., Any], frozenset[type], bool]]:
    """Return every public function whose first parameter is one of ``READ``, by its place: with the types that it
    takes there, and whether it needs nothing more."""
    found = {}
    for module in modules():
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(inspect.unwrap(function)):
                continue
            if function.__module__ != module.__name__ or inspect.iscoroutinefunction(function):
                continue
            parameters = inspect.signature(function).parameters.values()
            bare = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            needed = [each.name for each in parameters if each.default is each.empty and each.kind not in bare]
            hint = typing.get_type_hints(inspect.unwrap(function)).get(needed[0]) if needed else None
            is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
            taken = frozenset(typing.get_args(hint) if is_union else (hint,))
            if taken <= READ:
                found[f"{module.__name__}.{name}"] = (function, taken, len(needed) == 1)
    return found


def readers() -> dict[str, type]:
    """Return every class that takes a reply or a request in piece by piece, or writes it so: readers and dialects."""
    found = {}
    for module in modules():
        for name, each in vars(module).items():
            if inspect.isclass(each) and each.__module__ == module.__name__ and not inspect.isabstract(each):
                is_reader = any(callable(getattr(each, way, None)) for way in ("feed", "pieces", "line", "delta"))
                if is_reader and not getattr(each, "_is_protocol", False):
                    found[f"{module.__name__}.{name}"] = each
    return found


def request_types() -> set[type]:
    """Return what the routes decode bodies to."""
    said = {handler.opt["takes"] for handler in HANDLERS if handler.opt.get("takes")}
    return {each for one in said for each in (typing.get_args(one) or (one,)) if hasattr(each, "__struct_fields__")}
