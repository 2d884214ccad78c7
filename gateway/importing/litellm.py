# LiteLLM's proxy configuration (config.yaml: model_list, litellm_settings, router_settings, general_settings).

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

from gateway.config.presets import presets
from gateway.importing.draft import Draft, kinds, usual_variable
from gateway.importing.source import Part

KINDS = {
    "chat": None,
    "completion": ["completions"],
    "embedding": ["embeddings"],
    "rerank": ["rerank"],
    "image_generation": ["images"],
}
HINTS = {
    "rpm": "an upstream's own limits are learned from its answers; limit teams with `tollgate teams set`",
    "tpm": "an upstream's own limits are learned from its answers; limit teams with `tollgate teams set`",
    "max_budget": "budgets are a team's or key's: `tollgate teams set ID --usd-per-month …`",
    "budget_duration": "budgets are by the day and the month",
    "success_callback": "metrics are at /metrics, traces go to `tracing.url`, calls are in the ledger",
    "failure_callback": "metrics are at /metrics, traces go to `tracing.url`, calls are in the ledger",
    "callbacks": "metrics are at /metrics, traces go to `tracing.url`, calls are in the ledger",
    "guardrails": "see `safety` (docs/safety.md)",
    "store_model_in_db": "models stand in the file; `kill -HUP` reads it again",
    "temperature": "callers say it themselves",
    "max_tokens": "callers say it themselves, or `default_output` does",
    "routing_strategy": "targets share by `weight`, or without one by how soon each answers",
    "redis_host": "set REDIS_URL to redis://:password@host:port",
    "redis_port": "set REDIS_URL to redis://:password@host:port",
    "redis_password": "set REDIS_URL to redis://:password@host:port",
    "allowed_fails": "see `providers.NAME.breaker`",
    "cooldown_time": "see `providers.NAME.breaker`",
    "content_policy_fallbacks": "a refused prompt is not asked of another model",
    "environment_variables": "set them where the processes start",
    "alerting": "deploy/alerts.yml has alerts for Prometheus",
    "mock_response": "answers come from models",
    "tags": "a pool by tags is a model of its own name",
    "pass_through_endpoints": "only the endpoints of /openapi.json are served",
    "input_cost_per_second": "prices are per token or per call",
    "max_parallel_requests": "see `providers.NAME.concurrency`",
    "default_team_settings": "teams are made with `tollgate teams create`",
}


def read_litellm(root: Part, named: Iterable[str] = ()) -> Draft:
    """Return what LiteLLM's configuration comes to here. ``named``: the variables that it names."""
    draft = Draft((*named, *(key for row in presets().values() for key in row.keys)))  # which it takes by itself
    for entry in root.parts("model_list"):
        _read_model(entry, draft)
    settings, router = root.part("litellm_settings"), root.part("router_settings")
    for part in (settings, router):
        if part is not None:
            _read_fallbacks(part, draft)
            _read_patience(part, draft)
    if settings is not None:
        settings.pass_over("telemetry", "set_verbose", "json_logs")
        if settings.switch("drop_params"):
            draft.tell(settings, "drop_params", "so anyway, and told to callers")
        _read_cache(settings, draft)
    if router is not None:
        if router.text("routing_strategy") not in (None, "simple-shuffle", "latency-based-routing"):
            draft.tell(router, "routing_strategy", HINTS["routing_strategy"])
        _read_aliases(router, draft)
    _read_house(root.part("general_settings"), draft)
    draft.notes += root.left(HINTS)
    return draft


def _read_model(entry: Part, draft: Draft) -> None:
    name, params = entry.text("model_name"), entry.part("litellm_params")
    model = None if params is None else params.text("model")
    if name is None or params is None or model is None:
        return
    info = entry.part("model_info")
    kind, _, upstream = model.partition("/")
    if kind not in kinds() or not upstream:
        like = "openai" if params.has("api_base") and "/" not in model else ""
        kind, upstream = params.text("custom_llm_provider") or _maker_of(model) or like, model
    mode = None if info is None else info.text("mode")
    if kind not in kinds() or mode not in (*KINDS, None) or not upstream:
        why = f"no provider of the catalogue serves {model}"
        if mode not in (*KINDS, None):
            why = f"no endpoint for {mode}"
        draft.tell(params, "model", f"the model is left out: {why}")
        entry.drop()
        return
    provider = _provider_of(params, kinds()[kind], draft)
    if upstream == "*":
        draft.providers[provider]["models"] = "*"
        if name != model:
            draft.note(entry.line, entry.path, f"'{name}' is asked for as {provider}/MODEL, with each model's own name")
        return
    place: dict[str, Any] = {"provider": provider}
    if upstream != name:
        place["upstream_model"] = upstream
    if KINDS.get(mode or ""):
        place["abilities"] = KINDS[mode or ""]
    elif kind == "text-completion-openai":
        place["abilities"] = ["completions"]
    for part in (params, info):
        if part is not None:
            _read_facts(part, place)
    if info is not None:
        info.pass_over("id", "db_model", "supports_function_calling", "supports_vision", "litellm_provider")
    if (weight := params.text("weight")) is not None:
        place["weight"] = _number(weight)
    if not draft.add(name, place):
        draft.note(entry.line, entry.path, f"left out: {name} is at {provider} already, with the same key")


def _read_facts(part: Part, place: dict[str, Any]) -> None:
    """Read what a model costs and holds."""
    if (known_as := part.text("base_model")) is not None:
        place["listed_as"] = known_as.rpartition("/")[2]
    for key, ours in (("max_input_tokens", "context"), ("max_output_tokens", "max_output")):
        if (said := part.text(key)) is not None:
            place[ours] = _number(said)
    price = {
        ours: _per_million(said)
        for key, ours in (
            ("input_cost_per_token", "input"),
            ("output_cost_per_token", "output"),
            ("cache_read_input_token_cost", "cached_input"),
            ("cache_creation_input_token_cost", "cache_write"),
        )
        if (said := part.text(key)) is not None
    }
    if price:
        place["price"] = place.get("price", {}) | price


def _provider_of(params: Part, kind: str, draft: Draft) -> str:
    base, version, key = params.text("api_base") or params.text("base_url"), params.text("api_version"), None
    usual = usual_variable(kind, base)
    if (said := params.text("api_key")) is not None and said.lower() not in ("none", "dummy", "fake"):
        key = draft.secret(said, params, "api_key", usual)
    elif kind == "azure" or presets()[kind].keys:
        key = f"${{{usual_variable(kind, None)}}}"
    if base is not None:
        base = f"${{{base.removeprefix('os.environ/')}}}" if base.startswith("os.environ/") else base.rstrip("/")
        if kind not in ("azure", "anthropic", "gemini") and not base.startswith("${") and base.count("/") == 2:
            base += "/v1"  # LiteLLM adds the path by itself
    elif kind == "azure":
        base = "${AZURE_API_BASE}"
    name = draft.provider(
        kind, api_key=key, base_url=base, version=(version or "2024-10-21") if kind == "azure" else None
    )
    timeouts = {"total": params.text("timeout"), "first_token": params.text("stream_timeout")}
    for which, said in timeouts.items():
        if said is not None:
            _set_timeout(draft, name, which, said, params)
    return name


def _set_timeout(draft: Draft, name: str, which: str, said: str, part: Part) -> None:
    wanted = f"{float(_number(said) or 0):g}s"
    known = draft.providers[name].setdefault("timeouts", {}).setdefault(which, wanted)
    if known != wanted:
        draft.note(part.line, part.path, f"timeouts are a provider's: {name} has {which}: {known}, not {wanted}")


def _read_fallbacks(part: Part, draft: Draft) -> None:
    for key in ("fallbacks", "context_window_fallbacks"):
        for entry in part.parts(key):
            for name in entry.names():
                spares = draft.fallbacks.setdefault(name, [])
                spares += [one for one in entry.texts(name) if one not in spares]
    for spare in part.texts("default_fallbacks"):
        for name in draft.models:
            if name != spare and spare not in draft.fallbacks.setdefault(name, []):
                draft.fallbacks[name].append(spare)


def _read_patience(part: Part, draft: Draft) -> None:
    """Read retries and timeouts of all providers."""
    retries = part.text("num_retries")
    timeout = part.text("request_timeout") or part.text("timeout")
    for provider in draft.providers.values():
        if retries is not None:
            attempts = min(10, int(_number(retries) or 0) + 1)
            provider.setdefault("retries", {}).setdefault("attempts", attempts)
        if timeout is not None:
            provider.setdefault("timeouts", {}).setdefault("total", f"{float(_number(timeout) or 600):g}s")


def _read_cache(settings: Part, draft: Draft) -> None:
    if not settings.switch("cache"):
        return
    params = settings.part("cache_params")
    kind, mode = (None, None) if params is None else (params.text("type"), params.text("mode"))
    if kind not in (None, "redis"):
        draft.tell(settings, "cache", f"not carried over: no cache of type {kind}")
        return
    cache: dict[str, Any] = {} if mode == "default_off" else {"models": dict.fromkeys(draft.models, "all")}
    if params is not None and (ttl := params.text("ttl")) is not None:
        cache["ttl"] = f"{float(_number(ttl) or 3600):g}s"
    if params is not None:
        params.pass_over("host", "port", "password")
    draft.rest["cache"] = cache
    draft.tell(settings, "cache", "each team has a cache of its own (docs/caching.md)")


def _read_aliases(router: Part, draft: Draft) -> None:
    aliases = router.part("model_group_alias")
    for name in () if aliases is None else aliases.names():
        assert aliases is not None
        meant = aliases.text(name)
        if meant is None and (part := aliases.part(name)) is not None:
            meant = part.text("model")
        if meant in draft.models and name not in draft.models:
            draft.aliases[name] = meant
        else:
            draft.tell(aliases, name, f"left out: there is no model {meant}, or one of this name")


def _read_house(general: Part | None, draft: Draft) -> None:
    if general is None:
        return
    if (key := general.text("master_key")) is not None:
        draft.rest["admin_keys"] = [draft.secret(key, general, "master_key", "TOLLGATE_ADMIN_KEY")]
    if (url := general.text("database_url")) is not None:
        draft.rest["database_url"] = draft.secret(url, general, "database_url", "DATABASE_URL")
        draft.tell(general, "database_url", "take an empty database: teams and keys are made anew")


def _maker_of(model: str) -> str:
    """Return who makes a model that is named without its provider."""
    beginnings = {"gpt-": "openai", "o1": "openai", "o3": "openai", "o4": "openai", "text-embedding-": "openai"}
    beginnings |= {"claude": "anthropic", "gemini": "gemini", "chatgpt": "openai", "mistral-": "mistral"}
    return next((maker for beginning, maker in beginnings.items() if model.startswith(beginning)), "")


def _per_million(said: str) -> float | int:
    try:
        value = Decimal(said) * 1_000_000
    except InvalidOperation:
        return 0
    return int(value) if value == int(value) else float(value)


def _number(said: str) -> float | int | None:
    try:
        value = float(said)
    except ValueError:
        return None
    return int(value) if value == int(value) else value
