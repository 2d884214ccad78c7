# JSON Web Tokens of identity providers: who signed one, for whom it is, and until when it holds. What a token says
# counts only once all of that is right.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from gateway.core.clock import Clock
from gateway.core.principals import TokenKey
from gateway.core.settings import TokenIssuer
from gateway.identity.issuer import ALGORITHMS, Issuer, IssuerAway, TokenRefused
from protocol.errors import InvalidKey, Overloaded

LONGEST_TOKEN = 16 * 1024  # characters
LEAST_RSA = 2048  # bits

Claims = Mapping[str, Any]


async def verify(token: str, issuer: Issuer, audience: Sequence[str], leeway: float) -> Claims:
    """Return what a token claims. ``leeway``: seconds by which clocks may differ. Raises TokenRefused, IssuerAway."""
    import jwt

    header, _ = read_unverified(token)
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise TokenRefused("its signature is none that is taken here (RS256, PS256, ES256, EdDSA and their kin)")
    if key_id is not None and not isinstance(key_id, str):
        raise TokenRefused("it is no JSON Web Token")
    key = await issuer.key_of(key_id, algorithm)
    if algorithm[:2] in ("RS", "PS") and key.key.key_size < LEAST_RSA:
        raise TokenRefused(f"its issuer's key has fewer than {LEAST_RSA} bits")
    try:
        claims: Claims = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=list(audience),
            issuer=issuer.name,
            leeway=leeway,
            options={"require": ["exp", "iss", "aud"]},
        )
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as exc:  # a claim may be anything
        raise TokenRefused(_WHY.get(type(exc).__name__, "it is no JSON Web Token that holds")) from None
    return claims


def read_unverified(token: str) -> tuple[Claims, Claims]:
    """Return a token's header and claims, none of which is verified. Raises TokenRefused."""
    import jwt

    if len(token) > LONGEST_TOKEN:
        raise TokenRefused(f"it is longer than {LONGEST_TOKEN} characters")
    try:
        found = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise TokenRefused("it is no JSON Web Token") from None
    return found["header"], found["payload"]


def values_of(claims: Claims, claim: str) -> list[str]:
    """Return the texts that a claim has: by its whole name, else by a path with dots (``realm_access.roles``,
    ``kubernetes.io.namespace``)."""
    found = _find(claims, claim)
    listed = found if isinstance(found, list) else [found]
    return [value for value in listed if isinstance(value, str)]


def _find(claims: Any, path: str) -> Any:
    """Return what is at a path, whose names may have dots themselves; the longest name that is there leads on."""
    if not isinstance(claims, dict) or path in claims:
        return claims.get(path) if isinstance(claims, dict) else None
    head = max((name for name in claims if path.startswith(f"{name}.")), key=len, default=None)
    return None if head is None else _find(claims[head], path[len(head) + 1 :])


_WHY = {
    "ExpiredSignatureError": "it has expired",
    "ImmatureSignatureError": "it is not valid yet; do the clocks differ?",
    "InvalidAudienceError": "it is for another audience",
    "InvalidIssuerError": "it is of another issuer",
    "InvalidSignatureError": "its signature is wrong",
    "MissingRequiredClaimError": "it lacks one of the claims exp, iss and aud",
}


REMEMBERED = 10_000  # tokens


class TeamTokens:
    """Knows teams by tokens of their identity providers."""

    def __init__(
        self, issuers: Sequence[tuple[TokenIssuer, Issuer]], make: Callable[[TokenKey], Awaitable[bool]], clock: Clock
    ) -> None:
        self._issuers = issuers
        self._make = make
        self._clock = clock
        # By the digest of the token: its key, its end in unix seconds, its issuer, and when that one's keys were read.
        self._known: OrderedDict[bytes, tuple[TokenKey, float, Issuer, float]] = OrderedDict()

    async def key_of(self, token: str) -> TokenKey:
        """Return the key that a token stands for. Raises InvalidKey, Overloaded."""
        digest = sha256(token.encode("utf-8", "surrogateescape")).digest()
        if (known := self._known.get(digest)) is not None:
            key, ends_at, issuer, read_at = known
            if self._clock.now() < ends_at and issuer.stands_by(read_at):
                return key
            del self._known[digest]
        try:
            self._known[digest] = known = await self._check(token)
        except TokenRefused as exc:
            raise InvalidKey(f"The token was refused: {exc}.") from None
        except IssuerAway as exc:
            raise Overloaded("The token cannot be checked right now: its issuer does not answer.") from exc
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known[0]

    async def make(self, key: TokenKey) -> bool:
        """Make a key that tokens stand for; return whether it is there now. Raises Overloaded."""
        return await self._make(key)

    async def _check(self, token: str) -> tuple[TokenKey, float, Issuer, float]:
        _, claimed = read_unverified(token)
        of_issuer = [each for each in self._issuers if each[0].issuer == claimed.get("iss")]
        if not of_issuer:
            raise TokenRefused("its issuer is none of `jwt_auth`")
        audiences = values_of(claimed, "aud")
        settings, issuer = next(
            (one for one in of_issuer if not {*one[0].audience}.isdisjoint(audiences)), of_issuer[0]
        )
        claims = await verify(token, issuer, settings.audience, settings.leeway)
        return _named(settings, claims), int(claims["exp"]) + settings.leeway, issuer, issuer.read_at


def _named(settings: TokenIssuer, claims: Claims) -> TokenKey:
    """Return the key that a token names that is right."""
    values = values_of(claims, settings.claim)
    if settings.teams is None:
        if len(values) != 1:
            raise TokenRefused(f"its claim {settings.claim} names {len(values)} teams, and should name one")
        if not values[0].isprintable():  # no store takes all characters that JSON does
            raise TokenRefused(f"its claim {settings.claim} names what can be no team")
        return TokenKey(settings.issuer, values[0], values[0])
    for value, team_id in settings.teams.items():
        if value in values:
            return TokenKey(settings.issuer, team_id, value)
    raise TokenRefused(f"its claim {settings.claim} has no value that stands for a team here")
