# Which tools a caller may use: what the server's `tools.allow` and `teams` say, and what the key's `allowed_endpoints`
# leave of it. Pure.

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gateway.core.errors import RpcError
from gateway.core.principals import Caller
from gateway.core.settings import ALL_TOOLS, McpServer
from gateway.mcp.messages import INVALID_PARAMS
from protocol.errors import NotFound

EVERY_TEAM = "*"


class Grant(Struct, frozen=True):
    """What one caller may call at one server: the tools that each of these has."""

    server: McpServer
    bounds: tuple[frozenset[str], ...]

    def allows(self, tool: str) -> bool:
        """Whether the caller may call a tool."""
        return all(tool in bound or "*" in bound for bound in self.bounds)

    def check(self, tool: str) -> None:
        """Raise RpcError for a tool that the caller may not call."""
        if not self.allows(tool):
            named = [bound for bound in self.bounds if "*" not in bound]
            may = ", ".join(sorted(frozenset.intersection(*named))) or "none"
            words = f"Unknown tool: '{tool}' is none that this key may call at {self.server.name}. It may call: {may}."
            raise RpcError(words, INVALID_PARAMS, status=403, code="tool_not_allowed")


def grant_of(servers: Mapping[str, McpServer], name: str, caller: Caller) -> Grant:
    """Return what a caller may do at a server. Raises NotFound: one that there is not looks like one that is not for
    this caller."""
    found = {server.name: grant for server in servers.values() if (grant := _grant(server, caller)) is not None}
    if name not in found:
        may = ", ".join(sorted(found)) or "none"
        raise NotFound(f"There is no MCP server of this name for this key. It may use: {may}.")
    return found[name]


def _grant(server: McpServer, caller: Caller) -> Grant | None:
    of_team = server.teams.get(caller.team.id, server.teams.get(EVERY_TEAM, frozenset()))
    bounds = (server.tools, of_team, _of_key(server, caller.key_endpoints))
    return None if frozenset() in bounds else Grant(server, bounds)


def _of_key(server: McpServer, endpoints: frozenset[str] | None) -> frozenset[str]:
    """Return what is left by a key's `mcp` (every server), `mcp/SERVER` and `mcp/SERVER/TOOL`."""
    if endpoints is None or not endpoints.isdisjoint(("mcp", server.label)):
        return ALL_TOOLS
    beginning = f"{server.label}/"
    return frozenset(name.removeprefix(beginning) for name in endpoints if name.startswith(beginning))
