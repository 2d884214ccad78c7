# Tokens of identity providers: what is let in, and what never is, whoever signed it and whenever keys change.

from __future__ import annotations

import asyncio
import hmac
import time
from base64 import urlsafe_b64encode
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm

from gateway.core.principals import TokenKey
from gateway.core.settings import TokenIssuer
from gateway.identity.issuer import ASKED_AGAIN_AFTER, TRUSTED_FOR, Issuer, IssuerAway, TokenRefused
from gateway.identity.tokens import LONGEST_TOKEN, TeamTokens, read_unverified, values_of, verify
from protocol.errors import InvalidKey
from tests.support.clock import SetClock
from tests.support.identity_provider import CLIENT, ISSUER, IdentityProvider

PROVIDER = IdentityProvider()  # of the tests that make many tokens
OTHER = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def provider() -> IdentityProvider:
    return IdentityProvider()


@pytest.fixture
def clock() -> SetClock:
    return SetClock(time.time())


@pytest.fixture
def issuer(provider: IdentityProvider, clock: SetClock) -> Issuer:
    return Issuer(ISSUER, provider.ask, clock)


def check(token: str, issuer: Issuer, leeway: float = 30.0) -> Any:
    return asyncio.run(verify(token, issuer, ["another", CLIENT], leeway))


async def no_key(_: TokenKey) -> bool:
    raise AssertionError("no key is to be made here")


def by_hand(head: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    return ".".join(
        urlsafe_b64encode(part).rstrip(b"=").decode()
        for part in (msgspec.json.encode(head), msgspec.json.encode(claims), signature)
    )


def test_a_right_token_says_what_it_claims(provider: IdentityProvider, issuer: Issuer) -> None:
    """Of any audience that is taken, by any asymmetric kind of key, with a kid or, of one key, without."""
    of_rsa = rsa.generate_private_key(65537, 2048)
    claims = check(provider.token(groups=["a"], aud=["x", CLIENT]), issuer)
    nameless = check(provider.token(headers={}), issuer)
    provider.rotate("of RSA", of_rsa)
    issuer._tried_at = -1e9
    by_rsa = [check(provider.token(alg=alg), issuer) for alg in ("RS256", "PS384")]

    assert (claims["sub"], claims["groups"], nameless["sub"]) == ("ada", ["a"], "ada")
    assert [each["sub"] for each in by_rsa] == ["ada", "ada"]


NOW = int(time.time())
CLAIMS = {"iss": ISSUER, "aud": CLIENT, "sub": "ada", "exp": NOW + 3600}
WRONG: dict[str, tuple[Any, str]] = {
    "another issuer": (lambda p: p.token(iss="https://evil.test"), "another issuer"),
    "another audience": (lambda p: p.token(aud="console"), "another audience"),
    "no audience": (lambda p: p.token(aud=None), "lacks one of the claims"),
    "expired": (lambda p: p.token(exp=NOW - 60), "has expired"),
    "no end": (lambda p: p.token(exp=None), "lacks one of the claims"),
    "not yet": (lambda p: p.token(nbf=NOW + 86_400), "not valid yet"),
    "issued in the future": (lambda p: p.token(iat=NOW + 86_400), "not valid yet"),
    "alg none": (lambda p: by_hand({"alg": "none", "kid": "first"}, CLAIMS), "its signature is none that is taken"),
    "alg None in capitals": (lambda p: by_hand({"alg": "nOnE"}, CLAIMS), "its signature is none that is taken"),
    "no alg": (lambda p: by_hand({"kid": "first"}, CLAIMS), "its signature is none that is taken"),
    "no signature": (lambda p: by_hand({"alg": "ES256", "kid": "first"}, CLAIMS), "signature is wrong"),
    "another key by the same name": (lambda p: p.token(key=OTHER), "signature is wrong"),
    "an unknown kid": (lambda p: p.token(key=OTHER, headers={"kid": "evil"}), "no key of that id"),
    "a kid that is no text": (lambda p: by_hand({"alg": "ES256", "kid": 7}, CLAIMS, b"x" * 64), "no JSON Web Token"),
    "another algorithm for the key": (lambda p: by_hand({"alg": "RS256", "kid": "first"}, CLAIMS, b"x"), "no key of"),
    "signed by what is public": (
        lambda p: jwt.encode(CLAIMS, "a secret " * 4, "HS256", headers={"kid": "first"}),
        "its signature is none that is taken",
    ),
    "something that must be understood": (
        lambda p: p.token(headers={"kid": "first", "crit": ["b64"], "b64": False}),
        "no JSON Web Token",
    ),
    "changed": (lambda p: p.token(groups=["a"])[:-8] + "AAAAAAAA", "signature is wrong"),
    "claims that are no object": (lambda p: by_hand({"alg": "ES256", "kid": "first"}, [1]), "no JSON Web Token"),  # type: ignore[arg-type]
    "too long": (lambda p: p.token(filler="x" * LONGEST_TOKEN), "longer than"),
    "garbage": (lambda p: "eyJ.eyJ.eyJ", "no JSON Web Token"),
    "two parts": (lambda p: "eyJhbGciOiJFUzI1NiJ9.e30", "no JSON Web Token"),
    "brackets without end": (lambda p: by_hand({"alg": "ES256"}, CLAIMS) + "." + "[" * 9000, "no JSON Web Token"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_token_is_refused_with_the_reason(provider: IdentityProvider, issuer: Issuer, wrong: str) -> None:
    """And nothing of the token is in it."""
    make, why = WRONG[wrong]
    token = make(provider)

    with pytest.raises(TokenRefused, match=why) as told:
        check(token, issuer)

    assert not any(part and part in str(told.value) for part in token.split("."))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from([ISSUER, CLIENT, "ES256"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["kid", "aud", ""]), inner, max_size=2),
    max_leaves=4,
)
HEADS = st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64"]), ANY)
SAID = st.dictionaries(st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "sub", "jti"]), ANY)


@given(head=HEADS, claims=SAID, is_signed=st.booleans())
@hypothesis_settings(max_examples=75, deadline=None)
def test_whatever_a_token_says_it_is_refused_or_taken(
    head: dict[str, Any], claims: dict[str, Any], is_signed: bool
) -> None:
    """Any JSON in any place, signed by the issuer too, ends in an answer; a header never says more than a key's id."""
    provider, clock = PROVIDER, SetClock(time.time())
    issuer = Issuer(ISSUER, provider.ask, clock)
    tokens = TeamTokens([(TokenIssuer(issuer=ISSUER, audience=(CLIENT,)), issuer)], no_key, clock)
    if is_signed:
        signed = by_hand({"alg": "ES256", "kid": "first"}, {"iss": ISSUER} | claims).rpartition(".")[0]
        signature = ECAlgorithm(ECAlgorithm.SHA256).sign(signed.encode(), provider.keys["first"])
        token = f"{signed}.{urlsafe_b64encode(signature).rstrip(b'=').decode()}"
    else:
        token = by_hand(head, {"iss": ISSUER, "aud": CLIENT} | claims, b"x" * 64)

    with pytest.raises(InvalidKey):
        asyncio.run(tokens.key_of(token))


@given(st.text(st.sampled_from('eyJ.{}[]"=\n\0é'), max_size=40))
def test_any_text_is_a_refused_token(text: str) -> None:
    """However it is cut."""
    with pytest.raises(TokenRefused):
        read_unverified("eyJ" + text)


def test_a_public_key_is_no_secret_to_sign_with(provider: IdentityProvider, issuer: Issuer) -> None:
    """A token signed by HMAC with the published key, as a library that believes ``alg`` would take it."""
    key = provider.keys["first"].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    signed = by_hand({"alg": "HS256", "kid": "first"}, CLAIMS).rpartition(".")[0]
    token = f"{signed}.{urlsafe_b64encode(hmac.digest(key, signed.encode(), 'sha256')).rstrip(b'=').decode()}"

    with pytest.raises(TokenRefused):
        check(token, issuer)


def test_a_weak_key_signs_nothing(provider: IdentityProvider, issuer: Issuer) -> None:
    """RSA of 1024 bits can be broken."""
    provider.rotate("weak", rsa.generate_private_key(65537, 1024))

    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = provider.token(alg="RS256")

    with pytest.raises(TokenRefused, match="fewer than 2048 bits"):
        check(token, issuer)


def test_clocks_may_differ_a_little(provider: IdentityProvider, issuer: Issuer) -> None:
    """By the leeway and no more."""
    token = provider.token(exp=time.time() - 10)

    assert check(token, issuer)["sub"] == "ada"
    with pytest.raises(TokenRefused, match="has expired"):
        check(token, issuer, leeway=5)


async def test_a_new_key_is_found_by_one_reading(provider: IdentityProvider, issuer: Issuer, clock: SetClock) -> None:
    """For all calls that come with it; a key that is not there is not looked for again at once."""
    await verify(provider.token(), issuer, [CLIENT], 30)
    clock.move(ASKED_AGAIN_AFTER)
    provider.rotate("second")
    provider.asked.clear()
    token = provider.token()
    found = await asyncio.gather(*(verify(token, issuer, [CLIENT], 30) for _ in range(20)))
    readings = len(provider.asked)
    for _ in range(20):
        with pytest.raises(TokenRefused):
            await verify(provider.token(headers={"kid": "never was"}), issuer, [CLIENT], 30)

    assert len(found) == 20 and readings == 2  # the document, and the keys
    assert len(provider.asked) == readings


async def test_a_withdrawn_key_signs_no_more(provider: IdentityProvider, issuer: Issuer) -> None:
    """From the next reading on."""
    token = provider.token()
    await verify(token, issuer, [CLIENT], 30)
    provider.rotate("second")
    del provider.keys["first"]
    await issuer.read_keys()

    with pytest.raises(TokenRefused, match="no key of that id"):
        await verify(token, issuer, [CLIENT], 30)


async def test_no_call_waits_for_keys_that_are_read_anew(provider: IdentityProvider, issuer: Issuer) -> None:
    """While the issuer hangs, what is known holds."""
    await verify(provider.token(), issuer, [CLIENT], 30)
    provider.hangs = asyncio.Event()
    reading = asyncio.create_task(issuer.read_keys())
    await asyncio.sleep(0)
    claims = await asyncio.wait_for(verify(provider.token(), issuer, [CLIENT], 30), 1)
    provider.hangs.set()
    await reading

    assert claims["sub"] == "ada"


async def test_keys_hold_while_their_issuer_is_away(
    provider: IdentityProvider, issuer: Issuer, clock: SetClock
) -> None:
    """For a day; where none were ever read, the caller hears that the issuer is away."""
    provider.is_away = True
    with pytest.raises(IssuerAway):
        await verify(provider.token(), issuer, [CLIENT], 30)
    with pytest.raises(IssuerAway):  # within the time in which it is not asked again
        await verify(provider.token(), issuer, [CLIENT], 30)
    provider.is_away = False
    clock.move(ASKED_AGAIN_AFTER)
    await verify(provider.token(), issuer, [CLIENT], 30)
    provider.is_away = True
    clock.move(TRUSTED_FOR - 1)
    held = await verify(provider.token(), issuer, [CLIENT], 30)
    clock.move(1)

    assert held["sub"] == "ada"
    with pytest.raises(IssuerAway):
        await verify(provider.token(), issuer, [CLIENT], 30)


@pytest.mark.parametrize(
    "said",
    [
        {"issuer": "https://evil.test"},
        {"jwks_uri": "http://login.test/keys"},
        {"token_endpoint": "http://login.test/token"},
        {"jwks_uri": None},
    ],
)
def test_a_document_that_leads_astray_is_not_believed(
    provider: IdentityProvider, issuer: Issuer, said: dict[str, Any]
) -> None:
    """Another issuer's, or one that would have keys or secrets travel in the open."""
    provider.metadata |= said

    with pytest.raises(IssuerAway):
        check(provider.token(), issuer)


def test_keys_may_be_elsewhere_than_a_document_says(provider: IdentityProvider, clock: SetClock) -> None:
    """An issuer without discovery, such as a cluster's service accounts: its keys are at ``jwks_url``."""
    claims = check(provider.token(), Issuer(ISSUER, provider.ask, clock, "https://cluster.test/keys"))

    assert claims["sub"] == "ada" and provider.asked == ["https://cluster.test/keys"]


def test_claims_are_found_by_name_or_by_path() -> None:
    """A text, texts of a list; a name with dots before a path; nothing else."""
    claims = {"a": "x", "b": ["x", 1, "y"], "c.d": "z", "e": {"f": {"g": ["h"]}}, "n": 7}

    assert [values_of(claims, name) for name in ("a", "b", "c.d", "e.f.g", "e.f", "a.b", "n", "none")] == [
        ["x"],
        ["x", "y"],
        ["z"],
        ["h"],
        [],
        [],
        [],
        [],
    ]


TEAMS = {"batch jobs": "payments", "services": "payments", "lab": "research"}


@pytest.mark.parametrize(
    ("settings", "claims", "expected"),
    [
        ({"teams": TEAMS}, {"groups": ["staff", "lab"]}, ("research", "lab")),
        ({"teams": TEAMS}, {"groups": ["lab", "services"]}, ("payments", "services")),  # the file's order
        ({"teams": TEAMS}, {"groups": ["staff"]}, "no value that stands for a team"),
        ({"teams": TEAMS}, {}, "no value that stands for a team"),
        ({}, {"groups": "research"}, ("research", "research")),
        ({}, {"groups": ["research", "payments"]}, "names 2 teams"),
        ({}, {"groups": "re\0search"}, "can be no team"),
        ({}, {"groups": "research\ud800"}, "can be no team"),
        (
            {"claim": "k8s.io.namespace", "teams": {"pay": "payments"}},
            {"k8s.io": {"namespace": "pay"}},
            ("payments", "pay"),
        ),
        ({"audience": ("console",)}, {"groups": "research"}, "another audience"),
        ({}, {"iss": "https://evil.test", "groups": "research"}, "none of `jwt_auth`"),
    ],
)
def test_a_claim_leads_to_a_teams_key(
    provider: IdentityProvider,
    issuer: Issuer,
    clock: SetClock,
    settings: dict[str, Any],
    claims: dict[str, Any],
    expected: Any,
) -> None:
    """One key for each issuer, team and value, so that services of a team have limits of their own."""
    of_issuer = TokenIssuer(**{"issuer": ISSUER, "audience": (CLIENT,)} | settings)
    tokens = TeamTokens([(of_issuer, issuer)], no_key, clock)
    if isinstance(expected, str):
        with pytest.raises(InvalidKey, match=expected):
            asyncio.run(tokens.key_of(provider.token(**claims)))
        return
    key = asyncio.run(tokens.key_of(provider.token(**claims)))

    assert (key.team_id, key.value) == expected
    assert ISSUER in key.secret and not key.secret.isprintable()  # no header carries it


async def test_a_token_that_was_right_is_checked_again_when_it_ends_or_keys_change(
    provider: IdentityProvider, issuer: Issuer, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is known by its digest; a wrong one is never remembered as right."""
    checked: list[str] = []

    async def counted(token: str, *more: Any) -> Any:
        checked.append(token)
        return await verify(token, *more)

    monkeypatch.setattr("gateway.identity.tokens.verify", counted)
    tokens = TeamTokens([(TokenIssuer(issuer=ISSUER, audience=(CLIENT,), leeway=5.0), issuer)], no_key, clock)
    token = provider.token(groups="research", exp=int(clock.now()) + 100)
    for _ in range(3):
        await tokens.key_of(token)
    once = len(checked)
    clock.move(1)
    await issuer.read_keys()
    await tokens.key_of(token)
    anew = len(checked)
    clock.move(104)
    await tokens.key_of(token)  # by this machine's clock it holds; the answer is not by heart
    provider.keys = {"second": OTHER}
    await issuer.read_keys()
    with pytest.raises(InvalidKey):
        await tokens.key_of(token)
    with pytest.raises(InvalidKey):
        await tokens.key_of(token)

    assert (once, anew, len(checked)) == (1, 2, 5)
