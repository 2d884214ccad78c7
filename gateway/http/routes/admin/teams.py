# /admin: teams, their keys, the audit log and single usage records, for holders of an admin key.

from __future__ import annotations

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Limits, NamedLimits
from billing.ledger.ledger import find_row
from billing.upkeep.scope_room import scope_rooms, scopes_used
from gateway.accounts.auth import Authenticator
from gateway.accounts.guards import admin_guard, reading_guard, team_admin_guard, team_reading_guard
from gateway.accounts.schemas import (
    KeyPatch,
    NewKey,
    NewTeam,
    Rotation,
    TeamPatch,
    check_contents,
    check_safety,
    with_checked_webhook,
)
from gateway.accounts.serializers import (
    audit_view,
    key_view,
    list_view,
    made_view,
    read_value_prefix,
    record_view,
    team_budgets_view,
    team_scopes,
    team_view,
    value_budgets_view,
)
from gateway.accounts.team_deletion import delete_team
from gateway.accounts.team_keys import (
    KeyRecord,
    create_key,
    get_key,
    list_keys,
    no_key,
    revoke_key,
    rotate_key,
    update_key,
)
from gateway.accounts.teams import check_team, create_team, find_team, get_team, list_teams, update_team
from gateway.core.clock import Clock
from gateway.core.errors import Forbidden
from gateway.core.json_text import to_json
from gateway.dialects.options import check_endpoints
from gateway.http.current_edition import edition_of
from gateway.http.exchange import (
    AnyRequest,
    act_of,
    answer,
    now_of,
    own_team,
    part_of,
    read_parameters,
    read_query,
    read_whole,
    transaction,
)
from gateway.reports.ocsf import ocsf_event
from gateway.storage.audit_log import list_acts
from protocol.decoding import decode
from protocol.errors import BadRequest, NotFound, invalid_value


@post("/admin/teams", guards=[admin_guard], status_code=201, summary="Create a team", takes=NewTeam)
async def post_team(request: AnyRequest) -> Response[bytes]:
    """Create a team with its limits; each limit is optional: absent or null is none."""
    edition = edition_of(request)
    new = await with_checked_webhook(decode(await request.body(), NewTeam), edition.settings.callbacks_allow)
    check_safety(new.safety, edition.settings.safety)
    check_contents(new.contents, edition.settings.retention.contents)
    async with transaction(request) as connection:
        names = edition.catalog.names(), edition.catalog.models
        record = await create_team(connection, new, act_of(request), *names)
    return answer(team_view(record), 201)


@get("/admin/teams", guards=[reading_guard], summary="List the teams", query=("after", "limit", "search"))
async def get_teams(request: AnyRequest) -> Response[bytes]:
    """List teams in the order of their ids. ``after``: the last id of the page before; ``limit``: at most 1000;
    ``search``: a part of the id or the name, in any case."""
    query, limit = read_query(request)
    after, search = query.get("after"), query.get("search")
    async with transaction(request) as connection:
        records = await list_teams(connection, after=after, limit=limit + 1, search=search)
    return answer(list_view([team_view(record) for record in records], limit))


@get("/admin/teams/{team_id:str}", guards=[team_reading_guard], summary="Show a team")
async def get_one_team(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """Show a team, its limits, and what is used, held and left of its budgets, as ``/v1/team`` has it; one that was
    deleted with ``deleted_at``."""
    async with transaction(request) as connection:
        record = await find_team(connection, team_id)
        rooms = await scope_rooms(connection, team_scopes(record.team))
    return answer(team_view(record) | team_budgets_view(record.team, rooms))


@get(
    "/admin/teams/{team_id:str}/value-budgets",
    guards=[team_reading_guard],
    summary="Show what is left to a team's end users, or to the values of a tag",
    query=("of", "name", "after", "limit"),
)
async def get_value_budgets(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """Show what is used, held and left of the limits of end users (``of=user``, the default) or of a tag's values
    (``of=metadata:KEY``), of those that had calls this month, in the order of their ``id``, a keyed hash.

    ``name``: of this end user, or value, alone. ``after``: the last id of the page before; ``limit``: at most 1000.
    """
    query, limit = read_query(request)
    async with transaction(request) as connection:
        team = (await get_team(connection, team_id)).team
        prefix, limits = read_value_prefix(team, query.get("of", "user"))
        scopes = [prefix + team.hash_of(query["name"])] if "name" in query else None
        if scopes is None:
            scopes = await scopes_used(connection, prefix, after=query.get("after", ""), limit=limit + 1)
        others = limits.get("*", NamedLimits("*", Limits()))
        rooms = await scope_rooms(connection, {one: limits.get(one[-32:], others).limits for one in scopes})
    return answer(list_view([value_budgets_view(one, limits, rooms) for one in scopes], limit))


@patch("/admin/teams/{team_id:str}", guards=[admin_guard], summary="Change a team", takes=TeamPatch)
async def patch_team(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """Change what the body names and leave the rest; null takes a limit away, ``suspended`` shuts the team out."""
    edition = edition_of(request)
    changes = await with_checked_webhook(decode(await request.body(), TeamPatch), edition.settings.callbacks_allow)
    check_safety(changes.safety, edition.settings.safety)
    check_contents(changes.contents, edition.settings.retention.contents)
    async with transaction(request) as connection:
        names = edition.catalog.names(), edition.catalog.models
        record = await update_team(connection, team_id, changes, act_of(request), *names)
    part_of(request, Authenticator).forget()  # other gateways are notified a moment later
    return answer(team_view(record))


@delete(
    "/admin/teams/{team_id:str}", guards=[admin_guard], status_code=200, summary="Delete a team", query=("confirm",)
)
async def delete_one_team(request: AnyRequest, team_id: FromPath[str]) -> Response[bytes]:
    """Delete a team for ever, with all that it keeps here; ``confirm`` is its id once more. Its keys are refused within
    a second, its open batches are cancelled, calls that run come to their end. Its books stay, under its id."""
    confirm = read_parameters(request).get("confirm")
    async with transaction(request) as connection:
        record = await delete_team(connection, team_id, act_of(request), confirm)
    part_of(request, Authenticator).forget()
    return answer(team_view(record))


@post("/admin/keys", guards=[team_admin_guard], status_code=201, summary="Create a key", takes=NewKey)
async def post_key(request: AnyRequest) -> Response[bytes]:
    """Create a key of a team. The answer is the only one that ever shows it."""
    edition, now = edition_of(request), part_of(request, Clock).now()
    new = decode(await request.body(), NewKey)
    check_endpoints(new.allowed_endpoints)
    own_team(request, new.team_id, Forbidden("A team's admin makes keys of that team alone.", param="team_id"))
    async with transaction(request) as connection:
        pepper, models = edition.settings.key_pepper, edition.catalog.names()
        made = await create_key(connection, pepper, new, act_of(request), now, models)
    return answer(made_view(made, now_of(request)), 201)


@get("/admin/keys", guards=[team_reading_guard], summary="List the keys", query=("after", "team_id", "limit"))
async def get_keys(request: AnyRequest) -> Response[bytes]:
    """List keys, of one team with ``team_id``, else of all that are not deleted; never the keys themselves."""
    query, limit = read_query(request)
    async with transaction(request) as connection:
        await check_team(connection, query.get("team_id"))
        records = await list_keys(connection, team_id=query.get("team_id"), after=query.get("after"), limit=limit + 1)
    return answer(list_view([key_view(record, now_of(request)) for record in records], limit))


@get("/admin/keys/{key_id:str}", guards=[team_reading_guard], summary="Show a key")
async def get_one_key(request: AnyRequest, key_id: FromPath[str]) -> Response[bytes]:
    """Show what is known of a key."""
    async with transaction(request) as connection:
        return answer(key_view(await _visible_key(request, connection, key_id), now_of(request)))


@patch("/admin/keys/{key_id:str}", guards=[team_admin_guard], summary="Change a key", takes=KeyPatch)
async def patch_key(request: AnyRequest, key_id: FromPath[str]) -> Response[bytes]:
    """Change what the body names and leave the rest; null takes a value away. Every gateway heeds it within a second,
    and what is spent of its budgets stays spent."""
    changes = decode(await request.body(), KeyPatch)
    check_endpoints(changes.allowed_endpoints)
    now, models = part_of(request, Clock).now(), edition_of(request).catalog.names()
    async with transaction(request) as connection:
        await _visible_key(request, connection, key_id)
        record = await update_key(connection, key_id, changes, act_of(request), now, models)
    part_of(request, Authenticator).forget()
    return answer(key_view(record, now_of(request)))


@post(
    "/admin/keys/{key_id:str}/rotate",
    guards=[team_admin_guard],
    status_code=201,
    summary="Rotate a key",
    takes=Rotation | None,
)
async def post_rotation(request: AnyRequest, key_id: FromPath[str]) -> Response[bytes]:
    """Make a key like this one; this one works for ``overlap`` (24h) longer. An overlap of 0 ends it at once."""
    pepper, now = edition_of(request).settings.key_pepper, part_of(request, Clock).now()
    body = await request.body()
    rotation = decode(body, Rotation) if body.strip() else Rotation()
    async with transaction(request) as connection:
        await _visible_key(request, connection, key_id)
        made = await rotate_key(connection, pepper, key_id, rotation, act_of(request), now)
    part_of(request, Authenticator).forget()
    return answer(made_view(made, now_of(request)), 201)


@delete("/admin/keys/{key_id:str}", guards=[team_admin_guard], status_code=200, summary="Revoke a key")
async def delete_key(request: AnyRequest, key_id: FromPath[str]) -> Response[bytes]:
    """End a key for ever. Every gateway refuses it within a second. The key in its place, which a rotation made
    (``replaced_by``), goes on."""
    async with transaction(request) as connection:
        await _visible_key(request, connection, key_id)
        record = await revoke_key(connection, key_id, act_of(request))
    part_of(request, Authenticator).forget()
    return answer(key_view(record, now_of(request)))


@get(
    "/admin/audit-log",
    guards=[team_reading_guard],
    summary="Read the audit log",
    query=("before", "after", "team_id", "action", "limit", "format"),
)
async def get_audit_log(request: AnyRequest) -> Response[bytes]:
    """List what admins did and what the safety checks found, newest first. ``before``: the last id already seen;
    ``after``: an id from which to read on, oldest first; ``format=ocsf``: as events of OCSF, one JSON object a line."""
    query, limit = read_query(request)
    ends = {name: read_whole(query[name], name, 0, 2**63 - 1) for name in ("before", "after") if name in query}
    if len(ends) > 1:
        raise BadRequest("A page is before one entry or after one. Send 'before' or 'after'.", param="before")
    if (form := query.get("format", "json")) not in ("json", "ocsf"):
        raise invalid_value("format", "is json or ocsf")
    async with transaction(request) as connection:
        await check_team(connection, query.get("team_id"))
        entries = await list_acts(
            connection, team_id=query.get("team_id"), action=query.get("action"), limit=limit + 1, **ends
        )
    if form == "ocsf":
        lines = b"".join(to_json(ocsf_event(entry)) + b"\n" for entry in entries[:limit])
        return Response(lines, media_type="application/x-ndjson")
    return answer(list_view([audit_view(entry) for entry in entries], limit))


@get("/admin/usage-records/{request_id:str}", guards=[reading_guard], summary="Show a usage record")
async def get_usage_record(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
    """Show the ledger's row of one call, by the x-request-id of its answer."""
    async with transaction(request) as connection:
        row = await find_row(connection, request_id)
    if row is None:
        raise NotFound(
            f"There is no usage record '{request_id[:100]}'. A refused call has none.",
            param="request_id",
            code="usage_record_not_found",
        )
    return answer(record_view(row))


async def _visible_key(request: AnyRequest, connection: AsyncConnection, key_id: str) -> KeyRecord:
    """Return a key; to a team's admin no other team has any. Raises NotFound."""
    record = await get_key(connection, key_id)
    own_team(request, record.team_id, no_key(key_id))
    return record
