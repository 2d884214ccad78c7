# One identity provider, by what it publishes of itself: its discovery document and the keys by which it signs. Keys are
# read again behind the calls; a call waits only for a key that was never seen, and all that wait share one reading.

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from msgspec import Struct

from gateway.core.clock import Clock
from gateway.egress.urls import is_private

if TYPE_CHECKING:
    from jwt import PyJWK

REFRESHED_EVERY = 300.0  # seconds
ASKED_AGAIN_AFTER = 10.0  # seconds after which a key that is not known is looked for anew
TRUSTED_FOR = 86_400.0  # seconds that keys hold while their issuer does not answer
LONGEST_DOCUMENT = 512 * 1024  # bytes
MOST_KEYS = 100
# By the kind of key that each needs; none that is symmetric, and never "none".
ALGORITHMS = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}

log = structlog.get_logger(__name__)

# Method, URL, headers, body -> status, body. Raises IssuerAway.
Ask = Callable[[str, str, Mapping[str, str], bytes], Awaitable[tuple[int, bytes]]]


class IssuerAway(Exception):
    """The identity provider does not answer, or not as one does."""


class TokenRefused(Exception):
    """The token proves nothing. The message says why, and shows nothing of it."""


class Metadata(Struct, frozen=True):
    """What an issuer's discovery document says (OpenID Connect Discovery 1.0)."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str | None = None
    token_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class Issuer:
    """An identity provider. ``run`` keeps its keys fresh."""

    def __init__(self, name: str, ask: Ask, clock: Clock, jwks_url: str | None = None) -> None:
        import jwt  # noqa: F401  (35 ms: no call waits for it)

        self.name = name  # what its tokens have as ``iss``
        self._ask = ask
        self._clock = clock
        self._jwks_url = jwks_url
        self._metadata: Metadata | None = None
        self._keys: tuple[Mapping[str, Any], ...] = ()  # as published (RFC 7517)
        self._made: dict[tuple[str | None, str], PyJWK] = {}  # by their id and the algorithm
        self.read_at = -math.inf  # monotonic seconds; of the keys that hold
        self._tried_at = -math.inf
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Read the keys now and again, for ever."""
        while True:
            try:
                await self.read_keys()
            except IssuerAway as exc:
                log.warning("identity_provider_away", issuer=self.name, error=str(exc))
            await asyncio.sleep(REFRESHED_EVERY)

    async def key_of(self, key_id: str | None, algorithm: str) -> PyJWK:
        """Return the key that signs so. Raises TokenRefused where the issuer has none, IssuerAway where it would have
        to be asked and does not answer."""
        is_trusted = self.stands_by(self.read_at)
        key = self._find(key_id, algorithm) if is_trusted else None
        if key is None and self._clock.monotonic() - self._tried_at >= ASKED_AGAIN_AFTER:
            await self.read_keys()
            key = self._find(key_id, algorithm)
        elif key is None and not is_trusted:
            raise IssuerAway("its keys could not be read")
        if key is None:
            raise TokenRefused("its issuer has no key of that id and kind")
        return key

    def stands_by(self, read_at: float) -> bool:
        """Return whether the keys that were read then are those that hold now."""
        return read_at == self.read_at and self._clock.monotonic() - read_at < TRUSTED_FOR

    @property
    def number_of_keys(self) -> int:
        """How many keys it signs with."""
        return len(self._keys)

    async def metadata(self) -> Metadata:
        """Return what the issuer says of itself. Raises IssuerAway."""
        if self._metadata is None:
            if self._clock.monotonic() - self._tried_at < ASKED_AGAIN_AFTER:
                raise IssuerAway("its discovery document could not be read")
            await self.read_keys()
        assert self._metadata is not None, "an issuer whose keys are elsewhere is asked for nothing else"
        return self._metadata

    async def read_keys(self) -> None:
        """Read the keys; many at once share one reading. Raises IssuerAway; the keys stay what they were."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_keys())
            self._reading.add_done_callback(self._have_read)
        await asyncio.shield(self._reading)

    def _have_read(self, reading: asyncio.Task[None]) -> None:
        self._reading, self._tried_at = None, self._clock.monotonic()
        if not reading.cancelled():
            reading.exception()  # those who waited may have left

    async def _read_keys(self) -> None:
        if (url := self._jwks_url) is None:
            self._metadata = await self._read_metadata()
            url = self._metadata.jwks_uri
        found = await self._get(url, _KEYS)
        self._keys = tuple(key for key in found.keys[:MOST_KEYS] if key.get("use", "sig") == "sig")
        self._made.clear()
        self.read_at = self._clock.monotonic()

    async def _read_metadata(self) -> Metadata:
        found = await self._get(self.name.rstrip("/") + "/.well-known/openid-configuration", _METADATA)
        if found.issuer != self.name:
            raise IssuerAway("its discovery document is another issuer's")
        urls = (found.jwks_uri, found.authorization_endpoint, found.token_endpoint)
        if any(not is_private(url) for url in urls if url is not None):
            raise IssuerAway("its discovery document names a URL without https")
        return found

    async def _get(self, url: str, decoder: msgspec.json.Decoder[Any]) -> Any:
        status, body = await self._ask("GET", url, {"accept": "application/json"}, b"")
        if status != 200:
            raise IssuerAway(f"it answered {status}")
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError as exc:
            raise IssuerAway("its answer is no such document") from exc

    def _find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """Return the one key of this id, or the one key there is, where a token names none."""
        made = self._made.get((key_id, algorithm))
        if made is None and algorithm in ALGORITHMS:
            fitting = [key for key in self._keys if _fits(key, key_id, algorithm)]
            made = _make(fitting[0], algorithm) if len(fitting) == 1 else None
            if made is not None:
                self._made[key_id, algorithm] = made
        return made


class _Keys(Struct, frozen=True):
    keys: list[dict[str, Any]]


_KEYS = msgspec.json.Decoder(_Keys)
_METADATA = msgspec.json.Decoder(Metadata)


def _fits(key: Mapping[str, Any], key_id: str | None, algorithm: str) -> bool:
    kind, curve = ALGORITHMS[algorithm]
    return (
        (key_id is None or key.get("kid") == key_id)
        and (key.get("kty"), key.get("crv")) == (kind, curve)
        and key.get("alg", algorithm) == algorithm
    )


def _make(key: Mapping[str, Any], algorithm: str) -> PyJWK | None:
    from jwt import PyJWK, PyJWTError

    try:
        return PyJWK({name: value for name, value in key.items() if name != "d"}, algorithm)
    except (PyJWTError, ValueError, TypeError):
        return None
