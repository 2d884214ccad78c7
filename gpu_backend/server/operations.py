# What operators, balancers and the gateway's router ask: which model, how well, how busy; and to drain.

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from litestar import Request, Response, get, post
from msgspec import Struct
from msgspec.structs import asdict

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config
from gpu_backend.scheduling.admission import TIERS
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.checkpoint.model_cache import open_cache
from gpu_backend.server.checkpoint.model_source import fetch_model
from gpu_backend.server.client.engine_client import EngineState
from gpu_backend.server.front import Front, build_front, front_of, json_answer
from gpu_backend.server.warm_up import warm_up
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.messages import LoadReport
from protocol.decoding import decode_with_extra
from protocol.errors import BadRequest, NotFound, UnknownUrl, invalid_param
from protocol.serving.announcements import KvEventsAt
from protocol.serving.engine_load import EngineLoad, Fairness, StepCost


class ModelBody(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "tollgate"
    root: str
    parent: str | None = None  # of an adapter: the model that it adapts
    max_model_len: int | None  # null until the engine is ready
    version: str | None  # null where no registry has one
    input_modalities: tuple[str, ...]  # text, and image where pictures are read
    prefix_caching: bool | None  # whether prompts find the blocks of others that begin alike; null until it is ready


class LoraBody(Struct, frozen=True):
    """vLLM's, for both routes."""

    lora_name: str = ""
    lora_path: str = ""


class ModelToLoad(Struct, frozen=True):
    """What an engine that sleeps is to serve from now on, and as which replica; what is not given stays."""

    model: str = ""  # a folder, or where to fetch one
    served_model_name: str | None = None  # the folder's name if not given
    fleet_pool: str | None = None
    instance_id: str | None = None
    warm_up: tuple[str, ...] | None = None  # prompts


class Health(Struct, frozen=True):
    status: EngineState
    restarts: int


@get("/v1/models")
async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
    """List the model that is served, and its adapters."""
    front = front_of(request)
    adapters = front.engine.adapters.by_name.values()
    models = [_model(front), *(_model(front, adapter) for adapter in adapters)]
    return json_answer({"data": models, "object": "list"})


@get("/v1/models/{model_id:path}")
async def show_model(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Describe the model or an adapter, or say that there is no such."""
    front = front_of(request)
    return json_answer(_model(front, front.check_model(str(request.path_params["model_id"]).removeprefix("/"))))


@get("/health", opt={"is_open": True})
async def show_health(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Say whether this engine is alive: 200 when active, asleep or draining, 503 while it starts or after it failed."""
    engine = front_of(request).engine
    is_well = engine.state not in (EngineState.STARTING, EngineState.FAILED)
    return json_answer(Health(engine.state, engine.restarts), 200 if is_well else 503)


@get("/load")
async def show_load(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Describe how busy this engine is."""
    front = front_of(request)
    report, ready = front.engine.load, front.engine.ready
    told = front.settings.engine.kv_events
    load = EngineLoad(
        instance_id=front.instance_id,
        model_id=front.settings.served_model_name,
        status=front.engine.state,
        queue_depth=report.queue_depth if report else 0,
        running=report.running if report else 0,
        free_blocks=report.free_blocks if report else ready.total_blocks if ready else 0,
        total_blocks=ready.total_blocks if ready else 0,
        kv_utilization=report.kv_utilization if report else 0.0,
        tokens_per_second=report.tokens_per_second if report else 0.0,
        requests_per_second=report.requests_per_second if report else 0.0,
        prefix_hit_rate=report.prefix_hit_rate if report else 0.0,
        gpu_node_id=front.node_id,
        gpus=front.settings.engine.device.num_ranks,
        uptime_seconds=round(front.engine.uptime_seconds, 6),
        busy_seconds=round(front.engine.busy_seconds, 6),
        request_seconds=round(front.metrics.request_seconds / front.settings.engine.device.num_ranks, 6),
        max_running=front.settings.engine.steps.max_num_seqs,
        input_modalities=front.input_modalities,
        abilities=front.abilities,
        kv_transfer=front.settings.engine.transfer.kv_transfer_address is not None,
        adapters=tuple(front.engine.adapters.by_name),
        kv_events=KvEventsAt(told.endpoint, told.replay_endpoint) if told.publishes else None,
        roofline_share=(report.roofline_share if report else 0.0) or None,
        fairness={tier: _fairness(report, tier) for tier in TIERS} if report else {},
        step_cost=StepCost(**dataclasses.asdict(ready.step_cost)) if ready and ready.step_cost else None,
    )
    # What it has none of is left out.
    return json_answer({name: value for name, value in asdict(load).items() if value not in (None, ())})


def _fairness(report: LoadReport, tier: str) -> Fairness:
    gap, bound = (report.counters.get(f"service_{name}_{tier}", 0.0) for name in ("gap", "bound"))
    return Fairness(gap, bound)


@get("/version")
async def show_version(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Say which release this engine is of."""
    return json_answer({"version": release()})


@get("/metrics")
async def show_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return everything Prometheus reads."""
    return Response(front_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@post("/drain", status_code=200)
async def drain(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Take no more requests and finish what runs."""
    engine = front_of(request).engine
    engine.drain()
    return json_answer(Health(engine.state, engine.restarts))


@post("/sleep", status_code=200)
async def sleep(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Take no more requests, finish what runs, and give the device's memory back; answer when that is done."""
    engine, asked = front_of(request).engine, request.query_params
    if (level := asked.get("level", "1")) != "1":
        raise invalid_param("level", f"'{level[:20]}' is no level of sleep here: 1 keeps the weights in host memory.")
    if (mode := asked.get("mode", "wait")) != "wait":
        raise invalid_param("mode", f"'{mode[:20]}' is no mode of sleep here: with wait, replies that run end first.")
    await engine.sleep()
    return json_answer(Health(engine.state, engine.restarts))


@post("/wake_up", status_code=200)
async def wake_up(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Take the device's memory again; answer when requests are taken."""
    engine = front_of(request).engine
    tags = set(request.query_params.getall("tags", []))
    if tags and tags != {"weights", "kv_cache"}:
        raise invalid_param("tags", "weights and kv_cache come back together: name both, or none.")
    await engine.wake_up()
    return json_answer(Health(engine.state, engine.restarts))


@post("/load_model", status_code=200)
async def load_model(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Let an engine that sleeps serve another model, by the process that it has; answer when requests are taken."""
    front, body = front_of(request), decode_with_extra(await request.body(), ModelToLoad)[0]
    if not front.settings.allow_model_loading:
        raise UnknownUrl("Start the engine with --allow-model-loading to have it load other models while it runs.")
    engine, fleet = front.settings.engine, front.settings.fleet
    if fleet is None and (body.fleet_pool or body.warm_up):
        raise invalid_param("fleet_pool", "This engine announces itself to no pool: start it with --fleet-pool.")
    state, cache = request.app.state, open_cache(os.environ)
    try:
        try:
            folder = await asyncio.to_thread(fetch_model, body.model, cache)
            engine = replace(engine, checkpoint=replace(engine.checkpoint, model=str(folder), tokenizer=None))
            checkpoint = await asyncio.to_thread(load_checkpoint, folder, folder)
            await asyncio.to_thread(load_model_config, folder)  # what cannot be served leaves the model that is there
            called = (await asyncio.to_thread(Path(body.model).resolve)).name
        except (OSError, ValueError, UnsupportedModel) as exc:
            raise invalid_param("model", f"'{body.model[:200]}' is no checkpoint to serve: {exc}") from exc
        settings = replace(
            front.settings,
            engine=engine,
            served_model_name=body.served_model_name or called or str(folder),
            version=None,
            digests={},
            fleet=replace(fleet, pool=body.fleet_pool or fleet.pool) if fleet is not None else None,
            instance_id=body.instance_id or front.settings.instance_id,
            warm_up=front.settings.warm_up if body.warm_up is None else body.warm_up,
        )
        if front.engine.state is EngineState.SLEEPING:
            await front.engine.sleep()  # what runs may not have ended
        await front.engine.load_model(engine)
    except BaseException:
        cache.close()
        raise
    if (before := state.get("model_cache")) is not None:
        before.close()  # the copy of the model before is not in use any more
    state.model_cache, state.front = cache, build_front(settings, checkpoint, front.engine)
    front = state.front
    if state.announcer is not None:
        await state.announcer.follow(front.announcement, partial(warm_up, front))
    return json_answer(Health(front.engine.state, front.engine.restarts))


@get("/is_sleeping")
async def show_sleep(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Say whether the engine sleeps, or will once what runs is finished."""
    return json_answer({"is_sleeping": front_of(request).engine.state is EngineState.SLEEPING})


@post("/v1/load_lora_adapter", status_code=200)
async def load_adapter(request: Request[Any, Any, Any]) -> Response[str]:
    """Load an adapter from a folder of the engine's machine, under a name that clients can ask for."""
    front, body = await _lora_body(request)
    if not (body.lora_name and body.lora_path):
        raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
    if body.lora_name in front.settings.names:
        raise invalid_param("lora_name", f"'{body.lora_name}' is what the model itself is called.")
    front.engine.refuse_if_closed()
    await front.engine.adapters.load(body.lora_name, body.lora_path)
    return _done(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@post("/v1/unload_lora_adapter", status_code=200)
async def unload_adapter(request: Request[Any, Any, Any]) -> Response[str]:
    """Let an adapter go: its name at once, its weights when the last reply with it has ended."""
    front, body = await _lora_body(request)
    if not body.lora_name:
        raise BadRequest("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    if not front.engine.adapters.unload(body.lora_name):
        raise NotFound(f"The lora adapter '{body.lora_name[:100]}' cannot be found.", param="lora_name")
    return _done(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _lora_body(request: Request[Any, Any, Any]) -> tuple[Front, LoraBody]:
    """Return what is asked. Raises ``UnknownUrl`` where the operator does not allow it, ``BadRequest``."""
    front = front_of(request)
    if not front.settings.engine.lora.allow_runtime_lora_updating:
        raise UnknownUrl(
            "Start the engine with --allow-runtime-lora-updating to load and unload adapters while it runs."
        )
    return front, decode_with_extra(await request.body(), LoraBody)[0]


def _done(text: str) -> Response[str]:
    return Response(text, media_type="text/plain; charset=utf-8")


@cache
def release() -> str:
    """Return the release that is installed; a checkout that is not has none."""
    try:
        return metadata.version("tollgate")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _model(front: Front, adapter: Adapter | None = None) -> ModelBody:
    ready, base = front.engine.ready, front.settings.served_model_name
    return ModelBody(
        id=base if adapter is None else adapter.name,
        root=base if adapter is None else adapter.folder,
        parent=None if adapter is None else base,
        created=front.checkpoint.created,
        max_model_len=ready.max_model_len if ready else None,
        version=front.settings.version,
        input_modalities=front.input_modalities,
        prefix_caching=front.settings.engine.prefixes.prefix_caching and not ready.keeps_states if ready else None,
    )


handlers = [
    list_models,
    show_model,
    show_health,
    show_load,
    show_version,
    show_metrics,
    drain,
    sleep,
    wake_up,
    load_model,
    show_sleep,
    load_adapter,
    unload_adapter,
]
