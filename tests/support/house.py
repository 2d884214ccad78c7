# A gateway as its users meet it, for tests: the real app on a real port, real Postgres and Valkey behind it, and the
# scripted upstream as its outside world.

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from msgspec.structs import replace

import migrations
from billing.core.money import to_nano
from billing.core.prices import Price
from gateway.accounts.schemas import LimitsInput, NewKey, NewTeam
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team
from gateway.core.client_addresses import Networks
from gateway.core.settings import (
    ALL_TOOLS,
    BreakerPolicy,
    McpServer,
    McpTimeouts,
    OAuthClient,
    ProviderSettings,
    Retries,
    Settings,
    Timeouts,
)
from gateway.http.http_protocol import LOOPBACK, ConnectionLimit, HttpProtocol
from gateway.run.app import create_app
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from protocol.serving.listening import UNREAD, open_socket
from router.catalog.catalog import AutoRoute
from router.catalog.targets import Capability, Endpoint, ModelSpec
from tests.support import azure_rules
from tests.support.waiting import until

TEAM = "team_a"
MCP_CREDENTIAL = "mcp-credential-of-the-tests"
METRICS_KEY = "tgmetrics-" + "m" * 43
ADMIN_KEY = "tgadmin-" + "a" * 43
PEPPER = "pepper of all the tests"

# Many tests share a house: each sees the fault that it asked for, once, and none that another one left behind.
ONCE = Retries(attempts=1)
NEVER_OPENS = BreakerPolicy(min_requests=1_000_000)


@dataclass(frozen=True)
class House:
    """A running gateway: where it is, and who may call it."""

    url: str
    team_id: str
    team_key: str
    admin_key: str
    settings: Settings

    def client(self, key: str | None = None, **more: object) -> httpx.Client:
        """Return a client that calls with ``key``, the team's unless said otherwise."""
        headers = {"authorization": f"Bearer {key or self.team_key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, **more)  # type: ignore[arg-type]

    def record_of(self, answer: httpx.Response) -> dict[str, Any]:
        """Return the usage record of a call as the admin route shows it; it is there soon after the answer."""
        path = f"/admin/usage-records/{answer.headers['x-request-id']}"
        with self.client(self.admin_key) as admin:
            until(lambda: admin.get(path).status_code == 200)
            return dict(admin.get(path).json())

    def reset_breakers(self) -> None:
        """Forget what upstreams did: close every breaker that has seen anything, and use every key again."""
        seen = ("requests", "failures", "keys_set_aside")
        with self.client(self.admin_key) as admin:
            for breaker in admin.get("/admin/breakers").json()["breakers"]:
                if breaker["state"] == "closed" and not any(breaker[one] for one in seen):
                    continue  # a reset is a transaction and a trip to Redis, and there are thirty of them
                admin.post(f"/admin/breakers/{breaker['id']}/reset").raise_for_status()


def model(name: str, provider: str = "upstream", **more: object) -> ModelSpec:
    """Return a model that can do everything, at a price that makes sums easy: $1 in, $0.50 cached, $2 out."""
    facts: dict[str, object] = {
        "name": name,
        "provider": provider,
        "upstream_model": name,
        "price": Price(input=to_nano(1), cached_input=to_nano("0.5"), output=to_nano(2)),
        "context": 8192,
        "max_output": 1024,
        "capabilities": frozenset(Capability),
    }
    return ModelSpec(**(facts | more))  # type: ignore[arg-type]


def anthropic_provider(root_url: str) -> ProviderSettings:
    """Return a provider that speaks Anthropic's dialect at the scripted upstream."""
    return ProviderSettings(
        name="anthropic",
        format="anthropic",
        api_keys=("sk-upstream",),
        endpoints=(Endpoint("local", root_url),),
        timeouts=Timeouts(connect=10.0, first_token=1.5, between_tokens=1.5, total=3.0),
        retries=ONCE,
        breaker=NEVER_OPENS,
    )


def azure_provider(root_url: str, **more: object) -> ProviderSettings:
    """Return a provider that asks the deployments of an Azure at the scripted upstream."""
    facts: dict[str, object] = {"name": "azure", "format": "openai", "api_version": "2024-10-21", **more}
    facts |= {"headers": {"x-ms-useragent": "tollgate"}, "drop_fields": frozenset({"seed"})}
    return replace(anthropic_provider(root_url), **facts)


def gemini_provider(root_url: str, **more: object) -> ProviderSettings:
    """Return a provider that speaks Gemini's API at the scripted upstream."""
    facts: dict[str, object] = {
        "name": "gemini",
        "format": "gemini",
        "endpoints": (Endpoint("any", root_url + "/v1beta"),),
    }
    return replace(anthropic_provider(root_url), **facts | more)


def bedrock_provider(root_url: str, **more: object) -> ProviderSettings:
    """Return a provider that speaks Converse at the scripted upstream, with a key of Bedrock's own."""
    facts: dict[str, object] = {"name": "bedrock", "format": "bedrock", "endpoints": (Endpoint("us-east-1", root_url),)}
    return replace(anthropic_provider(root_url), **facts | more)


def entra_client(root_url: str) -> OAuthClient:
    """Return the client as whom the scripted Entra knows the gateway."""
    return OAuthClient(
        token_url=root_url + azure_rules.TOKENS,
        client_id="scripted",
        client_secret="sesame + more",
        scope=azure_rules.SCOPE,
    )


def mcp_servers(url: str) -> tuple[McpServer, ...]:
    """Return a server of tools, and the same one under other names: without patience, and with breakers that open soon,
    the first of these for one team alone."""
    tickets = McpServer(
        name="tickets",
        url=url,
        headers={"authorization": f"Bearer {MCP_CREDENTIAL}"},
        tools=frozenset({"find", "close"}),
        teams={"*": ALL_TOOLS},
        price=to_nano("0.001"),
        prices={"close": to_nano("0.01")},
        timeouts=McpTimeouts(connect=10.0, answer=20.0, total=30.0),
        breaker=NEVER_OPENS,
        max_answer_bytes=64 * 1024,
    )
    opens = BreakerPolicy(min_requests=2, open_for=60.0)
    frail = replace(tickets, name="frail", url=url + "/frail", teams={TEAM: ALL_TOOLS}, breaker=opens)
    hasty = replace(tickets, name="hasty", timeouts=McpTimeouts(connect=10.0, answer=0.4, total=0.6))
    return tickets, hasty, frail, replace(tickets, name="fragile", url=url + "/fragile", breaker=opens)


def settings_for(postgres_url: str, redis_url: str, upstream_url: str, data_dir: Path, **more: object) -> Settings:
    """Return settings with a small and a large model at the scripted upstream."""
    upstream = ProviderSettings(
        name="upstream",
        format="openai",
        api_keys=("sk-upstream",),
        endpoints=(Endpoint("local", upstream_url),),
        timeouts=Timeouts(connect=10.0, first_token=1.5, between_tokens=1.5, total=3.0),
        retries=ONCE,
        breaker=NEVER_OPENS,
    )
    facts: dict[str, object] = {
        "database_url": postgres_url,
        "redis_url": redis_url,
        "data_dir": data_dir,
        "admin_keys": (ADMIN_KEY,),
        "metrics_keys": (METRICS_KEY,),
        "key_pepper": PEPPER,
        "providers": {"upstream": upstream},
        "models": {"small": model("small"), "large": model("large", price=Price(input=to_nano(5), output=to_nano(20)))},
        "auto": {"auto": AutoRoute(small=("small",), large=("large",), quality=0.5)},
        "aliases": {"old-name": "large"},
    }
    return Settings(**(facts | more))  # type: ignore[arg-type]


@contextlib.contextmanager
def running_house(settings: Settings, unread: float = UNREAD) -> Iterator[House]:
    """Migrate, create a team with a key, and run the gateway until the end of the block."""
    migrations.upgrade(settings.database_url)
    key = asyncio.run(make_team(settings, TEAM))
    with serving(settings, unread) as url:
        yield House(url, TEAM, key, ADMIN_KEY, settings)


@contextlib.contextmanager
def serving(settings: Settings, unread: float = UNREAD, exempt: Networks = LOOPBACK, port: int = 0) -> Iterator[str]:
    """Run the app of ``settings`` on a port (0: any free one) and give its URL. ``unread``: as in ``open_socket``;
    ``exempt``: as in ``ConnectionLimit``."""
    with open_socket("127.0.0.1", port, unread) as listener:
        port = listener.getsockname()[1]
        connections = ConnectionLimit(exempt)
        config = uvicorn.Config(
            create_app(settings, connections=connections),
            http=partial(HttpProtocol, connections=connections),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        assert server.started, "the gateway did not start"
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)


async def make_team(settings: Settings, team: str, limits: LimitsInput | None = None, **more: Any) -> str:
    """Create a team and return a key of it."""
    database = Database(settings.database_url)
    try:
        async with database.begin() as connection:
            await create_team(connection, NewTeam(id=team, limits=limits, **more), Act("tests"))
            new = NewKey(team_id=team)
            return (await create_key(connection, settings.key_pepper, new, Act("tests"), time.time())).key
    finally:
        await database.close()
