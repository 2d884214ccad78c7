# Who may come in where: every route has one of these guards. What a role may do is the sum of the routes that name it;
# docs/operations/admin-keys.md has the table.

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from gateway.accounts.auth import Authenticator
from gateway.core.client_addresses import client_of
from gateway.core.errors import Forbidden, TeamSuspended
from gateway.core.principals import Admin, Caller, Role

Connection = ASGIConnection[Any, Any, Any, Any]

OF_SECRETS = "/v1/realtime"  # the one path of client secrets
SESSION = "tollgate_session"  # the cookie of a person who has signed in


class RoleGuard:
    """Lets in admin keys of some roles; those of role ``admin`` at every route.

    A team's admin is let in where the request names the team, in its path or as ``team_id``, and it is the key's own;
    where it names none, the handler looks (``own_team`` of gateway/http/exchange.py).
    """

    def __init__(self, *roles: Role) -> None:
        self.roles = (*roles, Role.ADMIN)

    async def __call__(self, connection: Connection, handler: BaseRouteHandler) -> None:
        caller = await identify(connection)
        if isinstance(caller, Caller):
            raise Forbidden("This route needs an admin key.")
        if caller.role not in self.roles:
            named = " or ".join(self.roles)
            raise Forbidden(f"This route needs an admin key of the role {named}; this key's is {caller.role}.")
        _check_team(connection, handler, caller)


READERS = (Role.VIEWER, Role.FINANCE, Role.OPERATOR)
admin_guard = RoleGuard()
reading_guard = RoleGuard(*READERS)
finance_guard = RoleGuard(Role.FINANCE)
operating_guard = RoleGuard(Role.OPERATOR)
team_reading_guard = RoleGuard(*READERS, Role.TEAM_ADMIN)  # of what is one team's
team_admin_guard = RoleGuard(Role.TEAM_ADMIN)  # changes to what is one team's


async def team_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Let teams in, by a team key."""
    caller = await identify(connection)
    if isinstance(caller, Admin):
        raise Forbidden("This is a team's route: call it with a team's key, not an admin's.")
    if caller.team.is_suspended:
        raise TeamSuspended(f"The team '{caller.team.id}' is suspended. Ask an admin of this gateway.")
    claimed = connection.headers.get("x-team-id")
    if claimed is not None and claimed != caller.team.id:
        raise Forbidden("The x-team-id header names another team than the key's own.", param="x-team-id")


async def metrics_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """Let in admins who may read everything, and metrics keys."""
    auth: Authenticator = connection.app.state.parts.get(Authenticator)
    key = read_key(connection)
    if key is None or not auth.may_scrape(key):
        await reading_guard(connection, handler)


async def team_or_admin_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """Let teams and admins in; the route decides what a team may see."""
    caller = await identify(connection)
    if isinstance(caller, Admin):
        _check_team(connection, handler, caller)


async def open_guard(_: Connection, __: BaseRouteHandler) -> None:
    """Let every request in: health checks and the console page."""


ADMIN_GUARDS = (
    admin_guard,
    reading_guard,
    finance_guard,
    operating_guard,
    team_reading_guard,
    team_admin_guard,
    metrics_guard,
)
GUARDS = (team_guard, *ADMIN_GUARDS, team_or_admin_guard, open_guard)


def _check_team(connection: Connection, handler: BaseRouteHandler, admin: Admin) -> None:
    """Hold a team's admin to requests that name its own team, where the route has a place to name one."""
    if admin.team_id is None:
        return
    if "team_id" in connection.path_params:
        named = connection.path_params["team_id"]
    elif "team_id" in handler.opt.get("query", ()):
        named = ",".join(connection.query_params.getall("team_id", []))
    else:
        return
    if named != admin.team_id:
        raise Forbidden(
            f"This key administers the team '{admin.team_id}' alone: name that as team_id.", param="team_id"
        )


async def identify(connection: Connection) -> Caller | Admin:
    """Return who calls, and write that into the request's state. Raises InvalidKey and what goes with it."""
    app = connection.app.state  # by items: its attributes are looked for, and missed, before they are found
    auth: Authenticator = app["parts"].get(Authenticator)
    address = client_of(connection.scope, app["editions"].current.settings.trusted_proxies)
    state = connection.scope["state"]
    state["address"] = address  # for the log, should the key be invalid
    key = read_key(connection)
    caller: Caller | Admin
    if key is None and (session := read_session(connection)) is not None:
        caller = await auth.identify_session(session)
    else:
        caller = await auth.identify(key, address, has_begun="has_begun" in state)
        if isinstance(caller, Caller) and caller.secret is not None and connection.scope["path"] != OF_SECRETS:
            raise Forbidden(f"A client secret opens conversations by voice alone: a WebSocket at {OF_SECRETS}.")
    state["caller"] = caller
    return caller


def read_session(connection: Connection) -> str | None:
    """Return what the cookie of a person who has signed in holds, where people do. A browser sends it with whatever any
    page makes it ask, so changes are taken from our own page alone. Raises Forbidden."""
    settings = connection.app.state.editions.current.settings.sign_in
    if settings is None or (token := read_cookie(connection, cookie_name(settings.public_url, SESSION))) is None:
        return None
    is_reading = connection.scope["method"] in ("GET", "HEAD")  # type: ignore[typeddict-item]
    if not is_reading and connection.headers.get("origin") != settings.public_url:
        raise Forbidden(f"A change by a session comes from a page at {settings.public_url}; programs send a key.")
    return token


def cookie_name(public_url: str, name: str) -> str:
    """Return the name of a cookie. Of one that begins so, browsers see to it that no other host has set it."""
    return f"__Host-{name}" if public_url.startswith("https:") else name


def read_cookie(connection: Connection, name: str) -> str | None:
    """Return the value of a cookie."""
    for part in connection.headers.get("cookie", "").split(";"):
        found, _, value = part.strip().partition("=")
        if found == name:
            return value
    return None


def read_key(connection: Connection) -> str | None:
    """Return the key that a request carries, as a bearer token, in x-api-key or, Azure's way, in api-key."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return connection.headers.get("x-api-key") or connection.headers.get("api-key")
