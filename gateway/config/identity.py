# The sections `sign_in` and `jwt_auth` of tollgate.yaml: where people sign in to the console, and whose tokens stand
# for keys of teams.

from __future__ import annotations

from urllib.parse import urlsplit

from gateway.config.fields import Faults, Read, complain, kind_of
from gateway.config.readers import by_name, duration, duration_or_zero, list_of, origin, secret, struct_of, text
from gateway.config.tree import Node, Scalar
from gateway.core.principals import Role
from gateway.core.settings import SignIn, TokenIssuer
from gateway.egress.urls import is_private

LONGEST_SESSION = 7 * 86_400.0  # seconds
LONGEST_LEEWAY = 300.0  # seconds
_ROLES = [role.value for role in Role if role is not Role.TEAM_ADMIN]


def read_sign_in(node: Node, faults: Faults) -> SignIn | None:
    """Read how people sign in."""
    found = _SIGN_IN(node, faults)
    if found is not None and not found.roles and not found.team_admins:
        right = "roles: {VALUE-OF-THE-CLAIM: viewer}, or team_admins: {VALUE-OF-THE-CLAIM: TEAM}"
        return complain(node, faults, f"lets no person in; say who may do what: {right}")
    if found is not None and "openid" not in found.scopes:
        return complain(node, faults, "`scopes` needs openid, or the provider gives no ID token")
    return found


def _private(read: Read[str]) -> Read[str]:
    """Have a reader of URLs take https alone, but on this machine."""

    def read_private(node: Node, faults: Faults) -> str | None:
        value = read(node, faults)
        if value is not None and not is_private(value):
            return complain(
                node, faults, "secrets and keys travel there: it begins with https:// (http:// on localhost)"
            )
        return value

    return read_private


def _issuer(node: Node, faults: Faults) -> str | None:
    """Read an issuer, which is compared letter by letter."""
    value = text(node, faults)
    try:
        parts = urlsplit(value or "")
        fits = bool(parts.hostname) and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        fits = False
    if value is not None and not fits:
        return complain(
            node, faults, f"expected a URL such as https://login.example.com/realms/x, found {kind_of(node)}"
        )
    return value


def _page(node: Node, faults: Faults) -> str | None:
    value = origin(node, faults)
    if value == "*":
        return complain(node, faults, "expected one origin, found *")
    if value is not None and value.endswith((":443", ":80")):  # compared with what browsers say
        return complain(node, faults, "browsers leave the usual port out; leave it out here, too")
    return value


def _bounded(read: Read[float], most: float, words: str) -> Read[float]:
    def read_bounded(node: Node, faults: Faults) -> float | None:
        value = read(node, faults)
        return complain(node, faults, f"at most {words}") if value is not None and value > most else value

    return read_bounded


def _role(node: Node, faults: Faults) -> str | None:
    if isinstance(node, Scalar) and node.text in _ROLES:
        return node.text
    hint = " (a team's admin stands in `team_admins`)" if isinstance(node, Scalar) and "team" in node.text else ""
    return complain(node, faults, f"expected one of {', '.join(_ROLES)}{hint}; found {kind_of(node)}")


def _audiences(node: Node, faults: Faults) -> tuple[str, ...] | None:
    if isinstance(node, Scalar):
        value = text(node, faults)
        return None if value is None else (value,)
    return list_of(text, what="audiences", least=1)(node, faults)


_TEAMS = by_name(text, "{VALUE-OF-THE-CLAIM: TEAM}")
_SIGN_IN = struct_of(
    SignIn,
    issuer=_private(_issuer),
    client_secret=secret,
    public_url=_private(_page),
    scopes=list_of(text, what="scopes", least=1),
    roles=by_name(_role, "{VALUE-OF-THE-CLAIM: viewer}"),
    team_admins=_TEAMS,
    session=_bounded(duration, LONGEST_SESSION, "7d: what a person may do is asked again at each sign-in"),
)
_TOKEN_ISSUER = struct_of(
    TokenIssuer,
    issuer=_private(_issuer),
    audience=_audiences,
    jwks_url=_private(_issuer),
    teams=_TEAMS,
    leeway=_bounded(duration_or_zero, LONGEST_LEEWAY, "5m"),
)
read_jwt_auth = list_of(_TOKEN_ISSUER, what="issuers")
