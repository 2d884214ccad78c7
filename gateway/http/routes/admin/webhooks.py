# /admin: the secrets that sign a team's callbacks, and the outbox, for holders of an admin key.

from __future__ import annotations

from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway.accounts.guards import operating_guard, reading_guard, team_admin_guard, team_reading_guard
from gateway.accounts.serializers import callback_view, list_view, webhook_secret_view
from gateway.accounts.team_secrets import PURPOSE, create_secret, delete_secret, list_secrets
from gateway.accounts.teams import get_team
from gateway.core.clock import Clock
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, act_of, answer, now_of, part_of, read_query, transaction
from gateway.outbox.store import find_callback, list_callbacks, reopen
from gateway.storage.audit_log import record_act
from gateway.storage.encryption import Sealer
from protocol.errors import NotFound, invalid_value


@post(
    "/admin/teams/{team_id:str}/webhook-secrets",
    guards=[team_admin_guard],
    status_code=201,
    summary="Create a webhook secret",
)
async def post_webhook_secret(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """Make a secret that signs the team's callbacks. No other answer ever shows it; two may be valid."""
    settings = edition_of(request).settings
    sealer = Sealer(settings.key_pepper, PURPOSE, *settings.other_key_peppers)
    async with transaction(request) as connection:
        made = await create_secret(connection, sealer, team_id, act_of(request))
    view = webhook_secret_view(made.record)
    return answer({"object": view["object"], "id": view["id"], "secret": made.secret, **view}, 201)


@get("/admin/teams/{team_id:str}/webhook-secrets", guards=[team_reading_guard], summary="List a team's webhook secrets")
async def get_webhook_secrets(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """List the team's secrets, oldest first; never the secrets themselves."""
    async with transaction(request) as connection:
        await get_team(connection, team_id)
        records = await list_secrets(connection, team_id)
    return answer(list_view([webhook_secret_view(record) for record in records], len(records)))


@delete(
    "/admin/teams/{team_id:str}/webhook-secrets/{secret_id:str}",
    guards=[team_admin_guard],
    status_code=200,
    summary="Delete a webhook secret",
)
async def remove_webhook_secret(
    request: AnyRequest, team_id: FromPath[str], secret_id: FromPath[str]
) -> Response[bytes]:
    """End a secret: nothing is signed with it any more. Without any secret the team's callbacks wait."""
    async with transaction(request) as connection:
        await delete_secret(connection, team_id, secret_id, act_of(request))
    return answer({"object": "webhook_secret", "id": secret_id, "deleted": True})


@get(
    "/admin/callbacks",
    guards=[team_reading_guard],
    summary="List callbacks",
    query=("after", "team_id", "state", "limit"),
)
async def get_callbacks(request: AnyRequest) -> Response[bytes]:
    """List callbacks, newest first: all, a team's with ``team_id``, what was given up with ``state=undelivered``."""
    query, limit = read_query(request)
    if query.get("state", "undelivered") != "undelivered":
        raise invalid_value("state", "can be undelivered; leave it out for all")
    async with transaction(request) as connection:
        if "team_id" in query:
            await get_team(connection, query["team_id"])
        rows = await list_callbacks(
            connection,
            team_id=query.get("team_id"),
            is_undelivered="state" in query,
            after=query.get("after"),
            limit=limit + 1,
        )
    return answer(list_view([callback_view(row, now_of(request)) for row in rows], limit))


@get("/admin/callbacks/{callback_id:str}", guards=[reading_guard], summary="Show a callback")
async def get_callback(request: AnyRequest, callback_id: FromPath[str]) -> Response[bytes]:
    """Show a callback: its state, tries, last status and last error."""
    async with transaction(request) as connection:
        row = await find_callback(connection, callback_id)
    if row is None:
        raise unknown_callback(callback_id)
    return answer(callback_view(row, now_of(request)))


@post(
    "/admin/callbacks/{callback_id:str}/redeliver",
    guards=[operating_guard],
    status_code=202,
    summary="Deliver a callback again",
)
async def post_redelivery(request: AnyRequest, callback_id: FromPath[str]) -> Response[bytes]:
    """Have a callback delivered again under the same webhook-id, whatever became of it; tried for another 24 hours."""
    async with transaction(request) as connection:
        row = await reopen(connection, callback_id, part_of(request, Clock).now())
        if row is None:
            raise unknown_callback(callback_id)
        await record_act(
            connection, act_of(request), "callback.redelivered", team_id=row["team_id"], subject=callback_id
        )
    return answer(callback_view(row, now_of(request)), 202)


def unknown_callback(callback_id: str) -> NotFound:
    """Return the error for a callback that is not in the outbox."""
    words = f"There is no callback '{callback_id[:100]}'. Finished ones are kept for 30 days."
    return NotFound(words, param="callback_id", code="callback_not_found")
