# Which tools a caller may use: what the server's `tools.allow` and `teams` say, and what the key's `allowed_endpoints`
# leave of it. An admin sees those of all teams, a team's admin that team's. Pure.

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gateway.core.errors import RpcError
from gateway.core.principals import Admin, Caller
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
            refusal = RpcError(words, INVALID_PARAMS, status=403, code="tool_not_allowed")
            raise refusal.keeping(f"This key may call: {may}.")


def grant_of(servers: Mapping[str, McpServer], name: str, caller: Caller) -> Grant:
    """Return what a caller may do at a server. Raises NotFound: one that there is not looks like one that is not for
    this caller."""
    found = {grant.server.name: grant for grant in grants_of(servers, caller)}
    if name not in found:
        may = ", ".join(sorted(found)) or "none"
        raise NotFound(f"There is no MCP server of this name for this key. It may use: {may}.")
    return found[name]


def grants_of(servers: Mapping[str, McpServer], who: Caller | Admin) -> list[Grant]:
    """Return what ``who`` may do, server by server; those that are closed to it are left out."""
    found = (Grant(server, _bounds(server, who)) for server in servers.values())
    return [grant for grant in found if frozenset() not in grant.bounds]


def _bounds(server: McpServer, who: Caller | Admin) -> tuple[frozenset[str], ...]:
    team_id = who.team.id if isinstance(who, Caller) else who.team_id
    if team_id is None:
        return (server.tools,)
    of_team = server.teams.get(team_id, server.teams.get(EVERY_TEAM, frozenset()))
    return (server.tools, of_team, _of_key(server, who.key_endpoints if isinstance(who, Caller) else None))


def _of_key(server: McpServer, endpoints: frozenset[str] | None) -> frozenset[str]:
    """Return what is left by a key's `mcp` (every server), `mcp/SERVER` and `mcp/SERVER/TOOL`."""
    if endpoints is None or not endpoints.isdisjoint(("mcp", server.label)):
        return ALL_TOOLS
    beginning = f"{server.label}/"
    return frozenset(name.removeprefix(beginning) for name in endpoints if name.startswith(beginning))
