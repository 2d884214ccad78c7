# python -m gpu_backend --model PATH: one model behind OpenAI's API.

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from gpu_backend.engine.process import die_with
from gpu_backend.server.checkpoint.model_registry import ModelVersion, find_version
from gpu_backend.server.checkpoint.model_source import fetch_model, fetch_tokenizer
from gpu_backend.server.client.announcer import FleetSettings
from gpu_backend.server.serving import serve
from gpu_backend.server.settings import FrontSettings, read_kv_events, read_lora_modules
from gpu_backend.server.warm_up import read_warm_up
from gpu_backend.step.config import (
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    PARTS,
    QUANTIZATIONS,
    ROLES,
    SPECULATIVE_METHODS,
    WAYS,
    engine_config,
)
from gpu_backend.step.cost import read_step_cost

SECRET = "TOLLGATE_ENGINE_SECRET"
FLEET_SECRET, FLEET_REDIS = "TOLLGATE_FLEET_SECRET", "TOLLGATE_FLEET_REDIS"
MOST_GIB = 2**20  # no host has a pebibyte
DIE_WITH_PARENT = "TOLLGATE_DIE_WITH_PARENT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, serve, return the exit status."""
    settings = read_settings(arguments, os.environ)
    if os.environ.get(DIE_WITH_PARENT) == "1":
        die_with(os.getppid(), signal.SIGTERM)
    logging.basicConfig(format="gpu_backend: %(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one prompt at a time needs no thread pool
    try:
        engine = settings.engine
        checkpoint, drafts = engine.checkpoint, engine.speculation
        checkpoint = replace(
            checkpoint,
            model=str(fetch_model(checkpoint.model, digests=settings.digests)),
            tokenizer=str(fetch_tokenizer(checkpoint.tokenizer)) if checkpoint.tokenizer else None,
        )
        if drafts.speculative_model:
            drafts = replace(drafts, speculative_model=str(fetch_model(drafts.speculative_model)))
        engine = replace(engine, checkpoint=checkpoint, speculation=drafts)
        return serve(replace(settings, engine=engine))
    except (OSError, ValueError) as exc:
        print(f"gpu_backend: {exc}", file=sys.stderr)  # noqa: T201
        return 1


def read_settings(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> FrontSettings:
    """Return what the command line says. What cannot work is told on stderr, and the process ends with status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        version = find_version(Path(options.registry), options.model) if options.registry else None
        if version is not None:
            parser.set_defaults(**version.flags)
            options = parser.parse_args(arguments)
        return _settings(options, version, environment)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_backend",
        description="Serve one Hugging Face checkpoint behind OpenAI's API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    usual = {each.name: each.default for kind in (*PARTS, FrontSettings) for each in fields(kind)}

    def add(flag: str, **told: Any) -> None:
        """Add a flag; where a setting of its name has a default, that is the flag's, and says its type."""
        default = usual.get(flag[2:].replace("-", "_"), MISSING)
        if default not in (MISSING, None) and "action" not in told:
            told = {"default": default, "type": type(default)} | told
        parser.add_argument(flag, **told)

    add("--model", required=True, metavar="PATH", help="folder, owner/name on the Hugging Face hub, s3:// or gs://")
    add("--registry", metavar="FILE", help="YAML of model versions; --model is NAME@VERSION of one, flags go first")
    add("--tokenizer", metavar="PATH", help="tokenizer and chat template from elsewhere, named like a model")
    add("--served-model-name", metavar="NAME", help="what clients call the model; the folder's name if not given")
    add("--host", help="address to listen on; beyond loopback a secret is demanded")
    add("--port", help="0 takes any free one")
    add("--api-key", metavar="SECRET", help=f"bearer token that every request must carry; ${SECRET} if not given")
    add("--device", choices=DEVICES, help="auto is cuda where there is one")
    add("--dtype", choices=DTYPES, help="auto is bfloat16 on cuda, float32 on the CPU")
    add("--quantization", choices=QUANTIZATIONS, help="round the weights while they are loaded; not if not given")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="auto is that of the model")
    add("--batch-invariant", action="store_true", help="the same bits whatever else is in the batch; slower")
    add("--tensor-parallel-size", metavar="N", help="devices that compute each layer together")
    add("--pipeline-parallel-size", metavar="N", help="stages of so many layers each, on others")
    meet = "of the first of these, where another starts the rest, as tollgate fleet does on Ray"
    add("--ranks-meet-at", metavar="HOST:PORT", help=meet)
    shares_out = "each of the former has some of a mixture's experts, rather than a part of all"
    add("--enable-expert-parallel", action=argparse.BooleanOptionalAction, default=False, help=shares_out)
    add("--max-num-batched-tokens", metavar="N", help="tokens a step")
    add("--max-num-seqs", metavar="N", help="replies that run at once")
    add("--max-batch-tier-tokens", type=int, metavar="N", help="of them for batch work; all if not given")
    cost = "JSON with what a step takes here; auto: measured at the start; off: nothing is predicted"
    add("--step-cost", metavar="FILE|auto|off", default="auto", help=cost)
    add("--batch-patience", metavar="S", help="after it batch work may pass")
    gives = "after it the tenant that holds most gives a reply's place to one that waits; inf for never"
    add("--interactive-patience", metavar="S", help=gives)
    lead = "tokens of service a tenant may be ahead and go next, for what it has cached; a step's if not given"
    add("--cached-lead", type=int, metavar="N", help=lead)
    add("--max-model-len", type=int, metavar="N", help="prompt and reply together; what the model allows if not given")
    add("--block-size", metavar="N", help="tokens in a block of the KV cache")
    add("--kv-offloading-size", type=float, default=0.0, metavar="GIB", help="host memory behind the KV cache")
    add("--kv-events-config", metavar="JSON", help="tells routers what the prefix cache has; vLLM's setting")
    exchanges = "where other engines read KV blocks, port 0 for any free one; without it none are exchanged"
    add("--kv-transfer-address", metavar="HOST:PORT", help=exchanges)
    by = "nixl: blocks come by what NIXL finds (pip install 'tollgate[nixl]') between engines that both have it"
    add("--kv-transfer-by", choices=WAYS, help=by)
    pulls = "after which KV blocks of another engine that have not come are computed"
    add("--kv-pull-seconds", metavar="S", help=pulls)
    add("--role", choices=ROLES, help="prefill: computes prompts for other engines alone; decode: makes replies alone")
    add("--shared-prompts", metavar="FILE", help="JSON list of system prompts that all tenants may share in the cache")
    add("--load-format", choices=LOAD_FORMATS, help="dummy makes random weights")
    add("--speculative-method", choices=SPECULATIVE_METHODS, help="where draft tokens come from")
    draft_model = "for draft: a smaller model with the same tokenizer; for eagle3: a head"
    add("--speculative-model", metavar="PATH", help=draft_model)
    add("--num-speculative-tokens", metavar="N", help="draft tokens a step")
    named = "LoRA adapters, models by their name"
    add("--lora-modules", nargs="+", type=str, default=[], metavar="NAME=PATH", help=named)
    add("--max-loras", type=int, metavar="N", help="adapters that the device has room for; those of --lora-modules")
    add("--max-lora-rank", metavar="R", help="for which each of them has room")
    loads = "clients may load and unload adapters, from any folder that the engine can read"
    add("--allow-runtime-lora-updating", action="store_true", help=loads)
    takes = "an engine that sleeps may be told to load another model, from any folder that it can read"
    add("--allow-model-loading", action="store_true", help=takes)
    add("--max-images", metavar="N", help="of a request, where the model reads some; 0 leaves its tower out")
    add("--max-image-pixels", metavar="N", help="of one image, before it is made smaller")
    add("--max-image-bytes", metavar="N", help="of one image, as it comes")
    add("--max-waiting", metavar="N", help="requests in the queue")
    add("--drain-seconds", metavar="S", help="after SIGTERM")
    add("--num-threads", type=int, metavar="N", help="of torch on the CPU; torch's own choice if not given")
    overlaps = "launch a step before the last one's tokens are known; on a GPU if not given"
    add("--async-scheduling", action=argparse.BooleanOptionalAction, help=overlaps)
    replays = "replay decodes from graphs; on a GPU if not given"
    add("--cuda-graphs", action=argparse.BooleanOptionalAction, help=replays)
    joins = f"announce this engine to gateways that have this pool; needs ${FLEET_SECRET}"
    add("--fleet-pool", metavar="NAME", help=joins)
    add("--fleet-redis", metavar="URL", help=f"the Redis of the gateways; ${FLEET_REDIS} if not given")
    add("--fleet-address", metavar="URL", help="http://HOST:PORT/v1 by which they reach it; as it listens if not given")
    warms = "prompts that are answered before it is announced as active"
    add("--warm-up", type=str, default="[]", metavar="JSON", help=warms)
    add("--instance-id", metavar="ID", help="name in /load, before a suffix for each start; host and port if not given")
    return parser


def _settings(
    options: argparse.Namespace, version: ModelVersion | None, environment: Mapping[str, str]
) -> FrontSettings:
    """Put the settings together. Raises ``ValueError`` for those that cannot work."""
    if not 0 <= options.kv_offloading_size < MOST_GIB:
        raise ValueError(f"kv_offloading_size is {options.kv_offloading_size}; it is GiB of host memory, from 0 up")
    own = {each.name for kind in PARTS for each in fields(kind)} - {"max_waiting"}  # which is said to the front
    said = {name: value for name, value in vars(options).items() if name in own} | {
        "model": version.source if version else options.model,
        "host_kv_bytes": int(options.kv_offloading_size * 2**30),
        "step_cost": None if options.step_cost in ("auto", "off") else read_step_cost(Path(options.step_cost)),
        "measures_step_cost": options.step_cost == "auto",
        "lora_modules": read_lora_modules(options.lora_modules),
    }
    engine = engine_config(**said)
    engine = replace(engine, kv_events=read_kv_events(options.kv_events_config or "{}"))
    secret = options.api_key or environment.get(SECRET) or None
    engine = replace(engine, transfer=replace(engine.transfer, kv_transfer_secret=secret or ""))
    own_name = version.name if version else Path(options.model).resolve().name
    return FrontSettings(
        engine=engine,
        served_model_name=options.served_model_name or own_name,
        version=version.version if version else None,
        digests=version.digests if version else {},
        instance_id=options.instance_id or f"{socket.gethostname()}:{options.port}",
        host=options.host,
        port=options.port,
        api_key=secret,
        shared_prompts=options.shared_prompts,
        max_waiting=options.max_waiting,
        drain_seconds=options.drain_seconds,
        fleet=_fleet(options, environment),
        warm_up=read_warm_up(options.warm_up),
        allow_model_loading=options.allow_model_loading,
    )


def _fleet(options: argparse.Namespace, environment: Mapping[str, str]) -> FleetSettings | None:
    if options.fleet_pool is None:
        if options.fleet_redis or options.fleet_address:
            raise ValueError("--fleet-redis and --fleet-address say nothing without --fleet-pool")
        return None
    return FleetSettings(
        pool=options.fleet_pool,
        redis_url=options.fleet_redis or environment.get(FLEET_REDIS, ""),
        secret=environment.get(FLEET_SECRET, ""),
        address=options.fleet_address,
    )


if __name__ == "__main__":
    sys.exit(main())
