# docs/configuration.md keeps up with the code: every setting that can be read stands in it, with its default.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from billing.core.prices import Price, PriceStep, Rates
from gateway.config.file import DEFAULT_DATA_DIR
from gateway.config.models import DEFAULT_CONTEXT, DEFAULT_MAX_OUTPUT
from gateway.core import settings
from gateway.core.clock import read_duration
from router.catalog.catalog import AutoRoute, Canary, ShadowTraffic
from router.catalog.targets import Endpoint, ModelSpec

PAGE = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
ROWS = {
    name: default
    for row in re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", PAGE, re.MULTILINE)
    for name, default in [(row[0], row[1].strip())]
}

# Where a struct's fields stand on the page; a field that has another name there, or none, is spelled out.
HOMES: list[tuple[type, str, dict[str, str | None]]] = [
    (
        settings.Settings,
        "",
        {
            "auto": "routes",
            "callbacks_allow": "callbacks.allow",
            "connections_per_address": "connections.per_address",
            "cors_origins": "cors.origins",
            "responses_stored_bytes": "responses.stored_bytes",
            "journal_fsync": "journal.fsync",
            "mcp_servers": "mcp",
            "hedges": "hedge",
            "left_out": None,
        },
    ),
    (
        settings.ProviderSettings,
        "",
        dict.fromkeys(("name", "timeouts", "retries", "breaker", "egress", "hosted_tools")),
    ),
    (settings.HostedTools, "hosted_tools.", {}),
    (settings.Egress, "", {}),
    (settings.OAuthClient, "oauth.", {}),
    (Endpoint, "endpoints[].", {}),
    (settings.Timeouts, "timeouts.", {}),
    (settings.Retries, "retries.", {}),
    (settings.BreakerPolicy, "breaker.", {}),
    (
        ModelSpec,
        "",
        {
            "name": None,
            "capabilities": "abilities",
            "follows_engine": None,
            "price": "price.input",
            "gpu_hour_nanousd": "gpu_hour",
        }
        | {"others": "targets", "portion": "targets[].weight", "batch_price": "batch_discount"},
    ),
    (Price, "price.", {"steps": "tiers", "batch_discount": None, "later": None, "pictures": "image"}),
    (PriceStep, "price.tiers[].", dict.fromkeys(Rates.__struct_fields__)),
    (AutoRoute, "routes.NAME.", {"shadow": "held_back"}),
    (ShadowTraffic, "routes.NAME.held_back.", {"budget_nanousd": "usd_per_day"}),
    (Canary, "canaries.NAME.", {}),
    (settings.Fleet, "fleet.", {}),
    (settings.Pool, "fleet.pools.NAME.", {}),
    (settings.EngineSpec, "fleet.pools.NAME.engine.", {}),
    (settings.Rollout, "fleet.pools.NAME.rollout.", {}),
    (settings.Safety, "safety.", {}),
    (settings.AbuseSettings, "safety.abuse.", {}),
    (settings.CheckerSettings, "safety.checker.", {}),
    (settings.SignIn, "sign_in.", {}),
    (settings.TokenIssuer, "jwt_auth[].", {}),
    (
        settings.McpServer,
        "mcp.servers.NAME.",
        {"tools": "tools.allow", "prices": "tools.prices", "price": "price"}
        | dict.fromkeys(("name", "egress", "timeouts", "breaker")),
    ),
    (settings.McpTimeouts, "mcp.servers.NAME.timeouts.", {}),
    (settings.QuotaSettings, "quotas.", {}),
    (settings.QueueSettings, "queue.", {}),
    (settings.BatchLimits, "batch.", {}),
    (settings.CacheSettings, "cache.", {}),
    (settings.Retention, "retention.", {}),
]
FIELDS = [
    (kind, field, prefix, named)
    for kind, prefix, named in HOMES
    for field in msgspec.structs.fields(kind)
    if named.get(field.name, field.name) is not None
]


@pytest.mark.parametrize(("kind", "field", "prefix", "named"), FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_setting_stands_on_the_page(kind: type, field: Any, prefix: str, named: dict[str, str]) -> None:
    """Each field of the settings has its row; where it has a plain default, the row says the same."""
    name = prefix + named.get(field.name, field.name)

    assert name in ROWS, f"docs/configuration.md has no row for `{name}` ({kind.__name__}.{field.name})"
    if isinstance(field.default, int | float) and not isinstance(field.default, bool):
        said = ROWS[name].strip("`")
        assert (read_duration(said) if read_duration(said) is not None else float(said)) == field.default
    elif isinstance(field.default, str):
        assert ROWS[name] == f"`{field.default}`"


def test_other_defaults_are_as_the_page_says() -> None:
    """Defaults that the reader of the file knows, rather than a struct."""
    assert ROWS["data_dir"] == f"`{DEFAULT_DATA_DIR}`"
    assert f"`{DEFAULT_CONTEXT}`" in ROWS["context"]
    assert f"`{DEFAULT_MAX_OUTPUT}`" in ROWS["max_output"]
