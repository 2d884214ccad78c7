# Signing in at an identity provider: OpenID Connect's authorization code flow with PKCE, state and nonce. What is to be
# remembered of a sign-in until the browser comes back is sealed and lies in the browser's own cookie.

from __future__ import annotations

import hmac
import re
import secrets
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from contextlib import suppress
from hashlib import sha256
from urllib.parse import quote_plus, urlencode, urlsplit

import msgspec
from msgspec import Struct

from gateway.core.clock import Clock
from gateway.core.principals import Person, Role
from gateway.core.settings import SignIn
from gateway.identity.issuer import Ask, Issuer, IssuerAway, TokenRefused
from gateway.identity.tokens import Claims, values_of, verify
from gateway.storage.encryption import Sealer, Unsealable
from protocol.errors import Unshown

CALLBACK = "/console/sign-in/callback"
FORGOTTEN_AFTER = 600.0  # seconds that a person has at the provider
LEEWAY = 30.0  # seconds by which clocks may differ
LABEL = "cookie"

_THERE = re.compile(r"/console(?:[/?][!-~]*)?")  # an address of the console, and of no other host


class NotSignedIn(Exception):
    """The sign-in failed. ``reason`` is a word for the console; the message is for the log."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Began(Struct, frozen=True):
    """What is remembered of a sign-in that goes on at the provider."""

    state: str
    nonce: str
    verifier: str
    there: str  # the address of the console that was meant
    until: float  # unix seconds


class SignInFlow:
    """Sends people to their identity provider, and reads what it says of them."""

    def __init__(self, settings: SignIn, issuer: Issuer, ask: Ask, sealer: Sealer, clock: Clock) -> None:
        self.settings = settings
        self.is_private = settings.public_url.startswith("https:")  # its cookies travel over https alone
        self._issuer = issuer
        self._ask = ask
        self._sealer = sealer
        self._clock = clock

    async def begin(self, there: str) -> tuple[str, str]:
        """Return the URL where the person signs in, and the cookie that remembers it. Raises NotSignedIn."""
        try:
            endpoint = (await self._issuer.metadata()).authorization_endpoint
        except IssuerAway as exc:
            raise NotSignedIn("away", str(exc)) from exc
        if endpoint is None:
            raise NotSignedIn("failed", "the provider has no authorization_endpoint")
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        meant = there if _THERE.fullmatch(there) else "/console"
        began = Began(state, nonce, verifier, meant, self._clock.now() + FORGOTTEN_AFTER)
        said = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": self.settings.public_url + CALLBACK,
            "scope": " ".join(self.settings.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": _digest(verifier),
            "code_challenge_method": "S256",
        }
        joint = "&" if urlsplit(endpoint).query else "?"
        cookie = urlsafe_b64encode(self._sealer.seal(msgspec.json.encode(began), LABEL)).decode()
        return endpoint + joint + urlencode(said), cookie

    async def finish(self, cookie: str | None, said: dict[str, str]) -> tuple[Person, str]:
        """Return who has signed in, and the address that was meant. ``said`` is the query with which the browser came
        back. Raises NotSignedIn."""
        began = self._unseal(cookie)
        if began is None or not hmac.compare_digest(began.state.encode(), said.get("state", "").encode()):
            raise NotSignedIn("expired", "no sign-in of this browser has this state, or it took too long")
        if "error" in said:
            reason = "cancelled" if said["error"] == "access_denied" else "failed"
            raise NotSignedIn(reason, f"the provider said {said['error'][:100]!r}")
        try:
            metadata = await self._issuer.metadata()
            is_told = metadata.authorization_response_iss_parameter_supported or "iss" in said
            if is_told and said.get("iss") != self.settings.issuer:  # RFC 9207
                raise NotSignedIn("failed", "the answer came from another issuer")
            token = await self._redeem(said.get("code", ""), began, metadata.token_endpoint or "")
            claims = await verify(token, self._issuer, (self.settings.client_id,), LEEWAY)
        except IssuerAway as exc:
            raise NotSignedIn("away", str(exc)) from exc
        except TokenRefused as exc:
            raise NotSignedIn("failed", f"the ID token was refused: {exc}") from exc
        return self._person_of(claims, began), began.there

    async def _redeem(self, code: str, began: Began, endpoint: str) -> str:
        """Return the ID token that a code stands for."""
        settings = self.settings
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": settings.public_url + CALLBACK,
            "code_verifier": began.verifier,
        }
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        methods = (await self._issuer.metadata()).token_endpoint_auth_methods_supported
        if settings.client_secret is None:
            form["client_id"] = settings.client_id
        elif "client_secret_basic" in methods:
            pair = f"{quote_plus(settings.client_id)}:{quote_plus(settings.client_secret)}"
            headers["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": settings.client_id, "client_secret": settings.client_secret}
        status, body = await self._ask("POST", endpoint, headers, urlencode(form).encode())
        if status != 200:  # what it says may quote the client's secret or the code
            raise NotSignedIn("failed", f"the provider's token endpoint answered {status}")
        try:
            return _TOLD.decode(body).id_token
        except msgspec.MsgspecError:
            raise NotSignedIn("failed", "the provider's token endpoint gave no id_token") from None

    def _person_of(self, claims: Claims, began: Began) -> Person:
        """Return who the ID token speaks of. It is right already but for what ties it to this sign-in."""
        settings, nonce, subject = self.settings, claims.get("nonce"), claims.get("sub")
        if not isinstance(nonce, str) or not hmac.compare_digest(nonce.encode(), began.nonce.encode()):
            raise NotSignedIn("failed", "the ID token has another nonce")
        if claims.get("azp", settings.client_id) != settings.client_id:
            raise NotSignedIn("failed", "the ID token was made for another client")
        if not isinstance(subject, str) or not 0 < len(subject) <= 255 or not subject.isprintable():
            raise NotSignedIn("failed", "the ID token has no subject")
        said = claims.get("email")
        is_address = isinstance(said, str) and 0 < len(said) <= 254 and said.isprintable()
        email = said if is_address and claims.get("email_verified", True) is not False else None
        values = values_of(claims, settings.claim)
        for value, role in settings.roles.items():
            if value in values:
                return Person(subject=subject, email=email, role=Role(role))
        for value, team_id in settings.team_admins.items():
            if value in values:
                return Person(subject=subject, email=email, role=Role.TEAM_ADMIN, team_id=team_id)
        why = f"none of the {len(values)} values of the claim {settings.claim} stands for a role; subject {subject!r}"
        raise NotSignedIn("no_role", why)

    def _unseal(self, cookie: str | None) -> Began | None:
        with suppress(ValueError, Unsealable, msgspec.MsgspecError):
            began = _BEGAN.decode(self._sealer.unseal(urlsafe_b64decode(cookie or ""), LABEL))
            return began if self._clock.now() < began.until else None
        return None


class _Told(Unshown, Struct, frozen=True):
    id_token: str


_TOLD = msgspec.json.Decoder(_Told)
_BEGAN = msgspec.json.Decoder(Began)


def _digest(verifier: str) -> str:
    """Return the challenge of a verifier (RFC 7636, S256)."""
    return urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()
