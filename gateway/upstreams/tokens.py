# Bearer tokens, for providers that take them in place of API keys: asked of an OAuth server, as one of its clients or
# as a service account of Google's, and renewed before they end; or read from a file that another program keeps fresh.

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from gateway.core.settings import DIRECT, AwsAccount, Egress, GoogleAccount, OAuthClient, ProviderSettings
from gateway.upstreams.bedrock.signing import find_credentials
from gateway.upstreams.client import UpstreamClient, read_error_body
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from gateway.upstreams.wire.reading import read_retry_after
from protocol.decoding import NOT_JSON
from protocol.errors import Unshown

RENEWED_BEFORE = 300.0  # seconds that a token has left when the next one is asked for
USUAL_LIFE = 3600.0  # seconds, where the server does not say
LOOKED_UP_FOR = 60.0  # seconds that credentials of AWS are believed
READ_FOR = 10.0  # seconds that a file is believed
ASKED_AGAIN_AFTER = 1.0  # seconds after a failure
LONGEST = 16 * 1024  # characters
CONNECT, PATIENCE = 5.0, 10.0  # seconds

GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"

Source = OAuthClient | GoogleAccount | AwsAccount | Path


class Token(Struct, frozen=True):
    """A token. Times are monotonic seconds, here and below."""

    text: str
    renewed_at: float
    ends_at: float


def source_of(provider: ProviderSettings) -> Source | None:
    """Return where a provider's tokens come from, or ``None`` where it takes keys."""
    return provider.oauth or provider.google_key_file or provider.token_file or provider.aws


class Tokens:
    """The tokens of all providers, by where they come from."""

    def __init__(self) -> None:
        self._known: dict[Source, Token] = {}
        self._failed: dict[Source, tuple[float, UpstreamFailure]] = {}  # until when it is not asked again, and why
        self._asking: dict[Source, asyncio.Task[Token]] = {}

    async def of(self, source: Source, client: UpstreamClient, now: float, egress: Egress = DIRECT) -> str:
        """Return a token that is good now. Many calls at once share one request. Raises UpstreamFailure."""
        known = self._known.get(source)
        if known is not None and now < known.renewed_at:
            return known.text
        try:
            if (failed := self._failed.get(source)) is not None and now < failed[0]:
                raise UpstreamError(failed[1].message, outcome=failed[1].outcome)
            try:
                known = self._known[source] = await self._next(source, client, now, egress)
            except UpstreamFailure as exc:
                self._failed[source] = now + ASKED_AGAIN_AFTER, exc
                raise
        except UpstreamFailure:
            if known is None or now >= known.ends_at:
                raise
        return known.text

    def drop(self, source: Source, text: str) -> None:
        """Forget a token that its provider refused, unless there is a newer one."""
        if (known := self._known.get(source)) is not None and known.text == text:
            del self._known[source]

    async def _next(self, source: Source, client: UpstreamClient, now: float, egress: Egress) -> Token:
        if isinstance(source, Path):
            return Token(await asyncio.to_thread(_read, source), now + READ_FOR, now + READ_FOR)
        if (asking := self._asking.get(source)) is None:
            next_one = _found(source, now) if isinstance(source, AwsAccount) else _ask(source, client, now, egress)
            asking = self._asking[source] = asyncio.create_task(next_one)
            asking.add_done_callback(lambda done: self._asked(source, done))
        return await asyncio.shield(asking)

    def _asked(self, source: Source, done: asyncio.Task[Token]) -> None:
        del self._asking[source]
        if not done.cancelled():
            done.exception()  # its callers may have left


async def _found(source: AwsAccount, now: float) -> Token:
    """Return credentials in the place of a token; botocore renews them, so they are looked up often."""
    text = await asyncio.to_thread(find_credentials, source.profile)
    return Token(text, now + LOOKED_UP_FOR, now + 2 * LOOKED_UP_FOR)


async def _ask(source: OAuthClient | GoogleAccount, client: UpstreamClient, now: float, egress: Egress) -> Token:
    """Ask an OAuth server for a token. What it says of a refusal may name the deployment's account, and stays here."""
    said = _as_client(source) if isinstance(source, OAuthClient) else await asyncio.to_thread(_as_account, source)
    headers = {
        "content-type": "application/x-www-form-urlencoded",
        "accept": "application/json",
        "accept-encoding": "identity",
    }
    url = source.token_url if isinstance(source, OAuthClient) else source.token_uri
    request = UpstreamRequest("POST", url, headers, urlencode(said).encode(), egress=egress)
    with closing(await client.send(request, CONNECT, PATIENCE)) as response:
        body = await read_error_body(response)  # an answer of a few bytes
    if response.status in (400, 401, 403):
        raise UpstreamError("The gateway's own credentials were refused a token.", outcome="refused_key")
    if response.status != 200:
        words, wait = f"The server of tokens answered {response.status}.", read_retry_after(response.headers)
        raise UpstreamError(words, outcome=f"token_{response.status}", retry_after=wait)
    try:
        told = _decoder.decode(body)
    except NOT_JSON as exc:
        raise UpstreamError("The server of tokens gave none.", outcome="token_malformed") from exc
    life = told.life()
    return Token(_checked(told.access_token), now + max(life - RENEWED_BEFORE, life / 2), now + life)


def _as_client(source: OAuthClient) -> dict[str, str]:
    """Return what a client says (RFC 6749, 4.4)."""
    said = {"grant_type": "client_credentials", "client_id": source.client_id, "client_secret": source.client_secret}
    return said | ({"scope": source.scope} if source.scope else {})


def _as_account(source: GoogleAccount) -> dict[str, str]:
    """Return what a service account says: a statement of its own, signed (RFC 7523)."""
    import jwt  # 35 ms, where a service account asks for its first token

    now = int(time.time())
    claims = {"iss": source.client_email, "scope": GOOGLE_SCOPE, "aud": source.token_uri, "iat": now, "exp": now + 3600}
    assertion = jwt.encode(claims, source.private_key, algorithm="RS256")
    return {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion}


def _read(file: Path) -> str:
    try:
        return _checked(file.read_text("utf-8").strip())
    except (OSError, ValueError) as exc:
        raise UpstreamError("The file of the gateway's token cannot be read.", outcome="refused_key") from exc


def _checked(text: str) -> str:
    """Return a token that can travel in a header."""
    if not text or len(text) > LONGEST or not text.isascii() or not text.isprintable() or " " in text:
        raise UpstreamError("The gateway's token is none.", outcome="refused_key")
    return text


class _Told(Unshown, Struct, frozen=True):
    access_token: str
    expires_in: float | str | None = None  # Entra's older endpoint says it as text

    def life(self) -> float:
        """Return the seconds for which the token is good."""
        try:
            seconds = float(self.expires_in or USUAL_LIFE)
        except ValueError:
            return USUAL_LIFE
        return seconds if 0 < seconds < 10 * 86_400 else USUAL_LIFE


_decoder = msgspec.json.Decoder(_Told)
