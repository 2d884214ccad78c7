# /admin/admin-keys: keys of admins, each with a role, beside those of the configuration file.

from __future__ import annotations

from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway.accounts.admin_keys import create_admin_key, list_admin_keys, revoke_admin_key
from gateway.accounts.auth import Authenticator
from gateway.accounts.guards import admin_guard
from gateway.accounts.schemas import NewAdminKey
from gateway.accounts.serializers import admin_key_view, list_view
from gateway.core.clock import Clock
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, act_of, answer, now_of, part_of, read_query, transaction
from protocol.decoding import decode


@post("/admin/admin-keys", guards=[admin_guard], status_code=201, summary="Create an admin key", takes=NewAdminKey)
async def post_admin_key(request: AnyRequest) -> Response[bytes]:
    """Create an admin key of a ``role``: viewer, finance, operator, team-admin (with a ``team_id``) or admin. The
    answer is the only one that ever shows it."""
    new = decode(await request.body(), NewAdminKey)
    pepper, now = edition_of(request).settings.key_pepper, part_of(request, Clock).now()
    async with transaction(request) as connection:
        key, record = await create_admin_key(connection, pepper, new, act_of(request), now)
    view = admin_key_view(record, now_of(request))
    return answer({"object": "admin_key", "key_id": record.key_id, "key": key} | view, 201)


@get("/admin/admin-keys", guards=[admin_guard], summary="List the admin keys", query=("after", "limit"))
async def get_admin_keys(request: AnyRequest) -> Response[bytes]:
    """List admin keys, never the keys themselves; those of the configuration file are not among them."""
    query, limit = read_query(request)
    async with transaction(request) as connection:
        records = await list_admin_keys(connection, after=query.get("after"), limit=limit + 1)
    return answer(list_view([admin_key_view(record, now_of(request)) for record in records], limit))


@delete("/admin/admin-keys/{key_id:str}", guards=[admin_guard], status_code=200, summary="Revoke an admin key")
async def delete_admin_key(request: AnyRequest, key_id: FromPath[str]) -> Response[bytes]:
    """End an admin key for ever. Every gateway refuses it within a second."""
    async with transaction(request) as connection:
        record = await revoke_admin_key(connection, key_id, act_of(request))
    part_of(request, Authenticator).forget()
    return answer(admin_key_view(record, now_of(request)))
