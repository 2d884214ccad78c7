# /admin: keys of providers that teams bring for their own calls, for holders of an admin key.

from __future__ import annotations

from difflib import get_close_matches

from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway.accounts.auth import Authenticator
from gateway.accounts.guards import team_admin_guard, team_reading_guard
from gateway.accounts.provider_keys import (
    create_provider_key,
    list_provider_keys,
    revoke_provider_key,
    rotate_provider_key,
)
from gateway.accounts.schemas import NewProviderKey, ProviderKeyRotation
from gateway.accounts.serializers import list_view, provider_key_view
from gateway.accounts.teams import get_team
from gateway.core.settings import Settings
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, act_of, answer, part_of, transaction
from gateway.storage.encryption import Sealer
from gateway.upstreams.registry import PURPOSE, takes_team_keys
from protocol.decoding import decode
from protocol.errors import invalid_param


@post(
    "/admin/teams/{team_id:str}/provider-keys",
    guards=[team_admin_guard],
    status_code=201,
    summary="Bring a team's own key for a provider",
    takes=NewProviderKey,
)
async def post_provider_key(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """Store a key of a provider, for this team's calls alone. No answer ever shows it: it is known by its
    ``fingerprint``, the first 8 digits of its SHA-256."""
    settings = edition_of(request).settings
    new = decode(await request.body(), NewProviderKey)
    _check_provider(new.provider, settings)
    async with transaction(request) as connection:
        record = await create_provider_key(connection, _sealer(settings), team_id, new, act_of(request))
    part_of(request, Authenticator).forget()  # other gateways are notified a moment later
    return answer(provider_key_view(record), 201)


@get(
    "/admin/teams/{team_id:str}/provider-keys",
    guards=[team_reading_guard],
    summary="List a team's own keys for providers",
)
async def get_provider_keys(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """List the team's keys by provider, in the order in which they are used; never the keys themselves."""
    async with transaction(request) as connection:
        await get_team(connection, team_id)
        records = await list_provider_keys(connection, team_id)
    return answer(list_view([provider_key_view(record) for record in records], len(records)))


@post(
    "/admin/teams/{team_id:str}/provider-keys/{key_id:str}/rotate",
    guards=[team_admin_guard],
    status_code=200,
    summary="Replace a team's own key for a provider",
    takes=ProviderKeyRotation,
)
async def post_provider_key_rotation(
    request: AnyRequest, team_id: FromPath[str], key_id: FromPath[str]
) -> Response[bytes]:
    """Put another key in this one's place: calls that begin now go with it, those that run end with the one before."""
    rotation = decode(await request.body(), ProviderKeyRotation)
    sealer = _sealer(edition_of(request).settings)
    async with transaction(request) as connection:
        record = await rotate_provider_key(connection, sealer, team_id, key_id, rotation, act_of(request))
    part_of(request, Authenticator).forget()
    return answer(provider_key_view(record))


@delete(
    "/admin/teams/{team_id:str}/provider-keys/{key_id:str}",
    guards=[team_admin_guard],
    status_code=200,
    summary="Revoke a team's own key for a provider",
)
async def delete_provider_key(request: AnyRequest, team_id: FromPath[str], key_id: FromPath[str]) -> Response[bytes]:
    """Erase a key. Every gateway goes without it within a second."""
    async with transaction(request) as connection:
        record = await revoke_provider_key(connection, team_id, key_id, act_of(request))
    part_of(request, Authenticator).forget()
    return answer(provider_key_view(record) | {"deleted": True})


def _sealer(settings: Settings) -> Sealer:
    return Sealer(settings.key_pepper, PURPOSE, *settings.other_key_peppers)


def _check_provider(name: str, settings: Settings) -> None:
    """Raise BadRequest for a provider that there is not, or that takes no keys of teams."""
    known = [each for each, provider in settings.providers.items() if takes_team_keys(provider)]
    if name in known:
        return
    if name in settings.providers:
        words = f"'{name}' is no provider that a team can bring a key for: it is asked without keys of its own."
        raise invalid_param("provider", words)
    close = get_close_matches(name, known, n=1)
    names = ", ".join(sorted(known)) or "none"
    hint = f"Did you mean '{close[0]}'?" if close else f"Those that take keys of teams: {names}."
    raise invalid_param("provider", f"There is no provider '{name[:100]}'. {hint}")
