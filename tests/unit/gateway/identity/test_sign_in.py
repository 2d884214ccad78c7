# How people sign in: what goes to the identity provider, and what of its answers lets a person in.

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from msgspec.structs import replace

from gateway.core.principals import Person, Role
from gateway.identity.issuer import Issuer
from gateway.identity.sign_in import FORGOTTEN_AFTER, NotSignedIn, SignInFlow
from gateway.storage.encryption import Sealer
from tests.support.clock import SetClock
from tests.support.identity_provider import CLIENT, ISSUER, SECRET, SIGN_IN, IdentityProvider


class Desk:
    """A gateway's side of signing in, and a browser's."""

    def __init__(self, **more: Any) -> None:
        self.provider, self.clock = IdentityProvider(), SetClock(time.time())
        issuer = Issuer(ISSUER, self.provider.ask, self.clock)
        settings = replace(SIGN_IN, **more)
        self.flow = SignInFlow(settings, issuer, self.provider.ask, Sealer("a pepper", "sign-in"), self.clock)

    def begin(self, there: str = "/console/calls?status=failed") -> dict[str, str]:
        """Leave for the provider; return what the browser takes along."""
        self.url, self.cookie = asyncio.run(self.flow.begin(there))
        return dict(parse_qsl(urlsplit(self.url).query))

    def come_back(self, sent: dict[str, str], cookie: str | None = None, **said: Any) -> tuple[Person, str]:
        """Come back with a code, for which the provider gives an ID token of these claims."""
        query = {"code": "a code", "state": sent["state"]} | said.pop("query", {})
        claims = {"nonce": sent["nonce"], "groups": ["admins"], "email": "ada@company.test"} | said
        if self.provider.told == (200, {}):
            self.provider.told = (200, {"id_token": self.provider.token(**claims)})
        return asyncio.run(self.flow.finish(self.cookie if cookie is None else cookie, query))


def test_the_code_flow_with_pkce_lets_a_person_in() -> None:
    """Back where they meant to go; the code is redeemed with the verifier that the challenge was made of."""
    desk = Desk()
    sent = desk.begin()
    person, there = desk.come_back(sent)
    (form,), (headers,) = desk.provider.forms, desk.provider.headers

    assert desk.url.startswith(ISSUER + "/authorize?")
    assert (sent["response_type"], sent["code_challenge_method"], sent["scope"]) == (
        "code",
        "S256",
        "openid email profile",
    )
    assert sent["redirect_uri"] == form["redirect_uri"] == "https://gateway.test/console/sign-in/callback"
    digest = urlsafe_b64encode(sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()
    assert (sent["code_challenge"], form["code"]) == (digest, "a code")
    assert b64decode(headers["authorization"].split()[1]).decode() == f"{CLIENT}:the+secret+of+the+client"
    assert SECRET not in desk.url and form["code_verifier"] not in desk.cookie
    assert there == "/console/calls?status=failed"
    assert person == Person(subject="ada", email="ada@company.test", role=Role.ADMIN)
    assert person.name == "ada@company.test (ada)"


@pytest.mark.parametrize(
    ("more", "methods", "expected"),
    [
        ({}, ["client_secret_post"], {"client_id": CLIENT, "client_secret": SECRET}),
        ({"client_secret": None}, ["none"], {"client_id": CLIENT}),
    ],
)
def test_the_client_shows_itself_as_the_provider_takes_it(
    more: dict[str, Any], methods: list[str], expected: dict[str, str]
) -> None:
    """In the form where it takes no basic authorization; a public client by its name alone."""
    desk = Desk(**more)
    desk.provider.metadata["token_endpoint_auth_methods_supported"] = methods
    desk.come_back(desk.begin())

    assert expected.items() <= desk.provider.forms[0].items()
    assert ("client_secret" in expected) == ("client_secret" in desk.provider.forms[0])
    assert "authorization" not in desk.provider.headers[0]


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"groups": ["staff", "controllers"]}, (Role.FINANCE, None)),
        ({"groups": ["controllers", "admins"]}, (Role.ADMIN, None)),  # the file's order
        ({"groups": "leads of a"}, (Role.TEAM_ADMIN, "team_a")),
        ({"groups": ["leads of a", "controllers"]}, (Role.FINANCE, None)),
    ],
)
def test_a_claim_leads_to_a_role(claims: dict[str, Any], expected: tuple[Role, str | None]) -> None:
    """The first line of the file that fits a person."""
    desk = Desk()
    person, _ = desk.come_back(desk.begin(), **claims)

    assert (person.role, person.team_id) == expected


@pytest.mark.parametrize(
    ("claims", "name"),
    [
        ({"email_verified": False}, "ada"),
        ({"email": None}, "ada"),
        ({"email": "a\nb"}, "ada"),
        ({"email": ["ada@company.test"]}, "ada"),
        ({"email_verified": True}, "ada@company.test (ada)"),
    ],
)
def test_an_address_that_is_not_the_persons_is_not_written_down(claims: dict[str, Any], name: str) -> None:
    """The subject always is: an address may be somebody else's tomorrow."""
    desk = Desk()
    person, _ = desk.come_back(desk.begin(), **claims)

    assert person.name == name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another state": ({"query": {"state": "evil"}}, "expired"),
    "no state": ({"query": {"state": ""}}, "expired"),
    "no cookie": ({"cookie": ""}, "expired"),
    "another cookie": ({"cookie": "AQAAAA=="}, "expired"),
    "refused by the person": ({"query": {"error": "access_denied"}}, "cancelled"),
    "refused by the provider": ({"query": {"error": "server_error"}}, "failed"),
    "another issuer answers": ({"query": {"iss": "https://evil.test"}}, "failed"),
    "another nonce": ({"nonce": "evil"}, "failed"),
    "no nonce": ({"nonce": None}, "failed"),
    "another client": ({"azp": "evil"}, "failed"),
    "another audience": ({"aud": "evil"}, "failed"),
    "expired": ({"exp": 1}, "failed"),
    "no subject": ({"sub": ""}, "failed"),
    "no role": ({"groups": ["staff"]}, "no_role"),
    "no groups": ({"groups": None}, "no_role"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_right_lets_nobody_in(why: str) -> None:
    """Each by the word that the console has a sentence for; no message shows a secret."""
    said, reason = REFUSED[why]
    desk = Desk()
    sent = desk.begin()

    with pytest.raises(NotSignedIn) as told:
        desk.come_back(sent, **said)

    assert told.value.reason == reason
    assert SECRET not in str(told.value) and sent["state"] not in str(told.value)


def test_a_sign_in_is_over_after_ten_minutes() -> None:
    """What the cookie remembers holds no longer."""
    desk = Desk()
    sent = desk.begin()
    desk.clock.move(FORGOTTEN_AFTER)

    with pytest.raises(NotSignedIn, match="took too long"):
        desk.come_back(sent)


def test_a_cookie_of_another_deployment_is_none() -> None:
    """It is sealed under the pepper."""
    desk, other = Desk(), Desk()
    other.flow._sealer = Sealer("another pepper", "sign-in")
    sent = desk.begin()

    with pytest.raises(NotSignedIn):
        asyncio.run(other.flow.finish(desk.cookie, {"code": "a code", "state": sent["state"]}))


@pytest.mark.parametrize("told", [(400, {"error": SECRET}), (200, {"access_token": "x"}), (200, {"id_token": SECRET})])
def test_an_answer_without_an_id_token_lets_nobody_in(told: tuple[int, Any]) -> None:
    """And what the provider says, which may quote secrets, is told nowhere."""
    desk = Desk()
    desk.provider.told = told

    with pytest.raises(NotSignedIn) as why:
        desk.come_back(desk.begin())

    assert why.value.reason == "failed" and SECRET not in str(why.value)


def test_a_provider_that_is_away_is_told() -> None:
    """At the beginning, and on the way back."""
    desk = Desk()
    sent = desk.begin()
    desk.provider.is_away = True
    with pytest.raises(NotSignedIn) as later:
        desk.come_back(sent)
    new = Desk()
    new.provider.is_away = True
    with pytest.raises(NotSignedIn) as first:
        new.begin()

    assert (first.value.reason, later.value.reason) == ("away", "away")


@pytest.mark.parametrize(
    "there",
    ["https://evil.test", "//evil.test", "/\\evil.test", "/consoles", "/console\n", "/v1/models", "", "javascript:1"],
)
def test_nobody_is_sent_elsewhere(there: str) -> None:
    """An address that is none of the console is not gone back to."""
    desk = Desk()
    sent = desk.begin(there)

    assert desk.come_back(sent)[1] == "/console"
    assert re.fullmatch(r"[\w=-]+", desk.cookie)
