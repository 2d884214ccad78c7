# Sections of tollgate.yaml whose keys are names that calls ask for: `canaries`, which names send a share of their
# conversations to another model; `hedge`, which ask a second target where the first is slow to begin; `cache`, which
# calls go by the cache, and how much of it there may be; and `mcp`, the servers whose tools are called through the
# gateway.

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from billing.core.money import NanoDollars
from gateway.config.catalog import Catalogue
from gateway.config.fields import Faults, Fields, complain, meant, shown
from gateway.config.models import name_in
from gateway.config.providers import headers_but, read_breaker, read_egress
from gateway.config.readers import by_name, dollars, duration, integer, list_of, number, one_of, struct_of, text, url
from gateway.config.tree import Node, Scalar, Section
from gateway.core.settings import (
    ALL_TOOLS,
    BreakerPolicy,
    CacheSettings,
    CacheUse,
    HedgeSettings,
    McpServer,
    McpTimeouts,
)
from router.catalog.catalog import Canary
from router.catalog.targets import Capability

USES = ("on", "all", "off")
SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MCP_HEADERS = frozenset(
    {"host", "connection", "content-type", "content-length", "transfer-encoding", "accept", "accept-encoding", "cookie"}
    | {"proxy-authorization", "last-event-id", "mcp-protocol-version", "mcp-session-id", "mcp-method", "mcp-name"}
)
_MCP_TIMEOUTS = struct_of(McpTimeouts)


def read_canaries(root: Fields, whole: Catalogue, kept: Catalogue) -> dict[str, Canary]:
    """Read the section: names are of the ``whole`` file; a canary goes whose name or model is not ``kept``."""
    section = Fields(root.node("canaries"), "canaries", root.faults).section
    if section is None:
        return {}
    asked = (*whole.models, *whole.auto, *whole.aliases)
    read = struct_of(
        Canary,
        model=name_in(whole.models, "model"),
        share=number(0, 1, above=True),
        errors=number(0, 1),
        slower=number(1),
        dearer=number(1),
        least=integer(1),
        window=duration,
    )
    found: dict[str, Canary] = {}
    for name, node in section.entries.items():
        if name not in asked:
            complain(node, root.faults, f"unknown model {name}; {meant(name, asked)}")
        canary = read(node, root.faults)
        if canary is None:
            continue
        if canary.model == whole.aliases.get(name, name):
            complain(node, root.faults, f"{name} means {canary.model} already; a canary is another model")
        if Capability.EMBEDDINGS in whole.models[canary.model].capabilities and not (
            {Capability.CHAT, Capability.COMPLETIONS} & whole.models[canary.model].capabilities
        ):
            complain(node, root.faults, "vectors of different models do not compare: a canary answers in words")
        found[name] = canary
    names = {*kept.models, *kept.auto, *kept.aliases}
    return {name: canary for name, canary in found.items() if name in names and canary.model in kept.models}


def read_hedges(root: Fields, offered: Iterable[str]) -> dict[str, HedgeSettings]:
    """Read the section; a name is any that is ``offered``."""
    section = Fields(root.node("hedge"), "hedge", root.faults).section
    if section is None:
        return {}
    known = _known(root, offered)
    read = struct_of(HedgeSettings, after=_after)
    found: dict[str, HedgeSettings] = {}
    for name, node in section.entries.items():
        if name not in known:
            complain(node, root.faults, f"unknown model {name}; {meant(name, known)}")
        if (hedge := read(node, root.faults)) is not None:
            found[name] = hedge if hedge.after else HedgeSettings(None)
    return found


def _after(node: Node, faults: Faults) -> float | None:
    """Read how long a first token is waited for: 0 stands for p95."""
    if isinstance(node, Scalar) and node.text == "p95":
        return 0.0
    if isinstance(node, Scalar) and not node.text[:1].isdigit():
        return complain(node, faults, f"expected p95, or a duration such as 800ms; found {shown(node)}")
    return duration(node, faults)


def read_cache(root: Fields, offered: Iterable[str]) -> CacheSettings:
    """Read the section; a model's name is any that is ``offered``, a team's any at all."""
    usual = CacheSettings()
    fields = Fields(root.node("cache"), "cache", root.faults)
    settings = CacheSettings(
        models=_models(root, fields, offered),
        ttl=fields.get("ttl", duration, usual.ttl),
        max_bytes=fields.get("max_bytes", integer(0), usual.max_bytes),
        max_answer_bytes=fields.get("max_answer_bytes", integer(1), usual.max_answer_bytes),
        shared=frozenset(fields.find("shared", list_of(text, what="team ids")) or ()),
    )
    fields.close()
    return settings


def _models(root: Fields, fields: Fields, offered: Iterable[str]) -> dict[str, CacheUse]:
    section = Fields(fields.node("models"), "cache.models", root.faults).section
    if section is None:
        return {}
    known = _known(root, offered)
    found: dict[str, CacheUse] = {}
    for name, node in section.entries.items():
        if name not in known:
            complain(node, root.faults, f"unknown model {name}; {meant(name, known)}")
        if (use := one_of(*USES)(node, root.faults)) is not None:
            found[name] = use
    return found


def _known(root: Fields, offered: Iterable[str]) -> list[str]:
    named = (name for kind in ("models", "routes", "aliases") for name in _names(root, kind))
    return [*dict.fromkeys((*named, *offered))]


def read_mcp(root: Fields) -> dict[str, McpServer]:
    """Read the servers."""
    fields = Fields(root.node("mcp"), "mcp", root.faults)
    servers = Fields(fields.node("servers"), "mcp.servers", root.faults).section
    fields.close()
    return {} if servers is None else {name: _server(name, each, root.faults) for name, each in servers.entries.items()}


def _server(name: str, node: Node, faults: Faults) -> McpServer:
    """Read one server; what is faulty stands in half-read."""
    if SERVER_NAME.fullmatch(name) is None:
        complain(node, faults, "a server's name stands in its URL here: letters, digits, _ and - alone")
    fields = Fields(node, node.path, faults)
    tools = Fields(fields.node("tools"), f"{node.path}.tools", faults)
    nothing: frozenset[str] = frozenset()
    allowed = tools.need("allow", _tools, nothing, 'which tools may be called: [find, close], or "*" for all')
    no_prices: dict[str, NanoDollars] = {}
    prices = tools.get("prices", by_name(dollars, "prices by tool: {close: 0.01}"), no_prices)
    tools.close()
    no_teams: dict[str, frozenset[str]] = {}
    read_teams = by_name(_tools, "tools by team: {support: [find]}")
    teams = fields.need("teams", read_teams, no_teams, 'which teams may use it: {support: [find], "*": "*"}')
    for tool in {*prices, *(tool for named in teams.values() for tool in named)} - ALL_TOOLS:
        if tool not in allowed and ALL_TOOLS.isdisjoint(allowed):
            complain(node, faults, f"the tool {tool} is none of tools.allow; {meant(tool, allowed)}")
    server = McpServer(
        name=name,
        url=fields.need("url", _mcp_url, "", "where the server answers: https://mcp.example.com/mcp"),
        headers=fields.get("headers", headers_but(MCP_HEADERS, ""), {}),
        egress=read_egress(fields),
        tools=allowed,
        teams=teams,
        price=fields.get("price", dollars, NanoDollars(0)),
        prices=prices,
        timeouts=fields.get("timeouts", _MCP_TIMEOUTS, McpTimeouts()),
        breaker=fields.get("breaker", read_breaker, BreakerPolicy()),
        max_answer_bytes=fields.get("max_answer_bytes", integer(1024, 64 * 1024 * 1024), 4 * 1024 * 1024),
    )
    fields.close()
    return server


def _mcp_url(node: Node, faults: Faults) -> str | None:
    value = url(("https", "http"), "https://mcp.example.com/mcp")(node, faults)
    parts = urlsplit(value or "")
    if value is not None and (parts.username or parts.password or parts.query or parts.fragment or not parts.hostname):
        return complain(node, faults, "scheme, host, port and path alone; a credential belongs in headers")
    return value


def _tools(node: Node, faults: Faults) -> frozenset[str] | None:
    """Read tools by name, or all of them."""
    if isinstance(node, Scalar) and node.text in ALL_TOOLS:
        return ALL_TOOLS
    named = list_of(text, what="tools", least=1)(node, faults)
    return None if named is None else frozenset(named)


def _names(root: Fields, kind: str) -> tuple[str, ...]:
    node = root.node(kind)
    return tuple(node.entries) if isinstance(node, Section) else ()
