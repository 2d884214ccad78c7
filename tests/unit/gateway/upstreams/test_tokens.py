# Tokens in place of keys: when one is asked for, how long it is used, and what happens where there is none.

from __future__ import annotations

import asyncio
import json
import time
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from gateway.core.settings import GoogleAccount, OAuthClient
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.tokens import Source, Tokens
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure

SOURCE = OAuthClient(token_url="https://tokens.example/t", client_id="me", client_secret="se&cret", scope="all")


class Server:
    """Answers requests for tokens, one after the other; without an answer left it is away."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[UpstreamRequest] = []

    async def send(self, request: UpstreamRequest, connect: float, patience: float) -> Server:
        """Note the request and answer."""
        self.asked.append(request)
        await asyncio.sleep(0)
        if not self.answers:
            raise UpstreamError("away", outcome="connect")
        self.status, body = self.answers.pop(0)
        self.headers: dict[str, str] = {}
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self

    async def read(self, longest: int) -> bytes:
        """Return what is answered."""
        return self._body

    def close(self) -> None:
        """Nothing to close."""


def token(text: str, life: object = 3600) -> tuple[int, Any]:
    return 200, {"access_token": text, "expires_in": life, "token_type": "Bearer"}


async def of(tokens: Tokens, server: Server, now: float, source: Source = SOURCE) -> str:
    return await tokens.of(source, cast(UpstreamClient, server), now)


async def test_calls_at_once_share_a_token_and_the_request_for_it() -> None:
    """The server is asked once, as its standard has it."""
    tokens, server = Tokens(), Server(token("one"))
    found = await asyncio.gather(*(of(tokens, server, 0.0) for _ in range(5)))

    assert found == ["one"] * 5
    [asked] = server.asked
    assert parse_qs(asked.body.decode()) == {
        "grant_type": ["client_credentials"],
        "client_id": ["me"],
        "client_secret": ["se&cret"],
        "scope": ["all"],
    }


async def test_a_token_is_renewed_before_it_ends() -> None:
    """Five minutes before, or after half of a life that is shorter; a life may be told as text, or not at all."""
    for life, last in ((3600, 3299.0), ("600", 299.0), (60, 29.0), (None, 3299.0), ("soon", 3299.0), (-1, 3299.0)):
        tokens, server = Tokens(), Server(token("one", life), token("two"))
        await of(tokens, server, 0.0)

        assert (await of(tokens, server, last), await of(tokens, server, last + 2)) == ("one", "two"), life


async def test_a_good_token_outlives_its_server() -> None:
    """While the server is away, what it gave is used to its end, and not beyond."""
    tokens, server = Tokens(), Server(token("one"))
    await of(tokens, server, 0.0)

    assert await of(tokens, server, 3500.0) == "one"
    with pytest.raises(UpstreamFailure):
        await of(tokens, server, 3600.0)


async def test_a_server_that_fails_is_left_alone_for_a_second() -> None:
    """Calls fail at once, in the same words, instead of asking it one after the other."""
    tokens, server = Tokens(), Server((503, b""), token("one"))
    for now in (0.0, 0.9):
        with pytest.raises(UpstreamError) as raised:
            await of(tokens, server, now)
        assert raised.value.outcome == "token_503"

    assert len(server.asked) == 1
    assert await of(tokens, server, 1.0) == "one"


async def test_a_refused_token_is_dropped_once() -> None:
    """A call that was refused with an older token leaves the newer one alone."""
    tokens, server = Tokens(), Server(token("one"), token("two"))
    await of(tokens, server, 0.0)
    tokens.drop(SOURCE, "one")
    await of(tokens, server, 0.0)
    tokens.drop(SOURCE, "one")

    assert await of(tokens, server, 0.0) == "two"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((401, {"error": "invalid_client", "error_description": "AADSTS7000215 app 4f2"}), "refused_key"),
        ((503, b"<html>"), "token_503"),
        ((200, b"<html>"), "token_malformed"),
        ((200, {"access_token": 7}), "token_malformed"),
        (token("two words"), "refused_key"),
        (token("two\r\nlines"), "refused_key"),
        (token(""), "refused_key"),
    ],
)
async def test_what_a_server_of_tokens_says_stays_here(answer: tuple[int, Any], outcome: str) -> None:
    """No caller hears of the deployment's account; another target may be asked."""
    with pytest.raises(UpstreamError) as raised:
        await of(Tokens(), Server(answer), 0.0)

    assert (raised.value.outcome, raised.value.moves_on, raised.value.status) == (outcome, True, 502)
    assert "AADSTS" not in raised.value.message


async def test_a_caller_that_leaves_takes_nothing_with_it() -> None:
    """The request for a token goes on for the others."""
    tokens, server = Tokens(), Server(token("one"))
    first, second = (asyncio.create_task(of(tokens, server, 0.0)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()

    assert await second == "one"


async def test_a_file_is_read_again(tmp_path: Path) -> None:
    """What another program wrote there is used ten seconds later at the latest."""
    file, tokens, server = tmp_path / "token", Tokens(), Server()
    file.write_text("one\n")
    first = await of(tokens, server, 0.0, file)
    file.write_text("two\n")

    assert [first, await of(tokens, server, 9.0, file), await of(tokens, server, 10.0, file)] == ["one", "one", "two"]
    file.unlink()
    with pytest.raises(UpstreamError):
        await of(tokens, server, 21.0, file)


def plain(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


async def test_a_service_account_signs_for_its_token() -> None:
    """It states who it is and what for, for an hour, to the one who gives tokens, and signs that with its key."""
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = GoogleAccount(client_email="us@project", private_key=pem, token_uri="https://oauth2.example/token")
    server = Server(token("ya29.one"))

    assert await of(Tokens(), server, 0.0, account) == "ya29.one"
    [asked] = server.asked
    said = parse_qs(asked.body.decode())
    head, claims, signature = said["assertion"][0].split(".")
    stated = json.loads(plain(claims))
    assert (asked.url, said["grant_type"]) == (account.token_uri, ["urn:ietf:params:oauth:grant-type:jwt-bearer"])
    assert json.loads(plain(head)) == {"alg": "RS256", "typ": "JWT"}
    assert abs(stated.pop("iat") - time.time()) < 60 and stated.pop("exp") - time.time() > 3500
    assert stated == {
        "iss": "us@project",
        "scope": "https://www.googleapis.com/auth/cloud-platform",
        "aud": account.token_uri,
    }
    key.public_key().verify(plain(signature), f"{head}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256())
