# The identity providers of a process: one for each issuer that the configuration names, asked as upstreams are.

from __future__ import annotations

from msgspec import Struct

from gateway.accounts.token_keys import TokenKeys
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.identity.issuer import Issuer
from gateway.identity.sign_in import SignInFlow
from gateway.identity.tokens import TeamTokens
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.issuers import ask_by


class Identity(Struct, frozen=True):
    """What of it a process has."""

    issuers: tuple[Issuer, ...] = ()
    sign_in: SignInFlow | None = None
    tokens: TeamTokens | None = None


def open_identity(settings: Settings, database: Database, client: UpstreamClient, clock: Clock) -> Identity:
    """Return what the configuration asks for; nothing is asked of an issuer yet."""

    ask = ask_by(client)
    issuers: dict[tuple[str, str | None], Issuer] = {}

    def issuer(name: str, jwks_url: str | None = None) -> Issuer:
        if (name, jwks_url) not in issuers:
            issuers[name, jwks_url] = Issuer(name, ask, clock, jwks_url)
        return issuers[name, jwks_url]

    flow = tokens = None
    pepper, others = settings.key_pepper, settings.other_key_peppers
    if settings.jwt_auth:
        keys = TokenKeys(database, clock, pepper, others)
        tokens = TeamTokens(
            [(each, issuer(each.issuer, each.jwks_url)) for each in settings.jwt_auth], keys.make, clock
        )
    if settings.sign_in is not None:
        sealer = Sealer(pepper, "sign-in", *others)
        flow = SignInFlow(settings.sign_in, issuer(settings.sign_in.issuer), ask, sealer, clock)
    return Identity(tuple(issuers.values()), flow, tokens)
