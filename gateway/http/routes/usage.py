# GET /v1/usage: what a team used and owes. GET /admin/usage: every team's usage, page by page. GET /admin/report: what
# all teams used, and what it cost the operator. GET /v1/team: the team that a key belongs to and what it may do; POST
# /v1/team/key/rotate: another secret for that key.

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from litestar import Response, get, post
from litestar.response import Stream
from msgspec.structs import replace

from billing.core.store_errors import POSTGRES_AWAY
from billing.upkeep.owner_list import silent_room
from billing.upkeep.scope_room import scope_rooms
from gateway.accounts.auth import Authenticator
from gateway.accounts.guards import reading_guard, team_guard, team_or_admin_guard
from gateway.accounts.schemas import OwnRotation
from gateway.accounts.serializers import (
    budgets_view,
    dollars,
    limits_view,
    made_view,
    model_limits_view,
    moment_of,
    team_budgets_view,
    team_scopes,
    value_limits_view,
)
from gateway.accounts.team_keys import replace_secret
from gateway.core.clock import Clock
from gateway.core.errors import Forbidden
from gateway.core.principals import Admin, Caller
from gateway.http.current_edition import edition_of
from gateway.http.exchange import (
    AnyRequest,
    answer,
    caller_of,
    now_of,
    own_act,
    part_of,
    principal_of,
    read_flag,
    read_parameters,
    read_query,
    transaction,
)
from gateway.overload.read_limit import StoredLimit
from gateway.reports.admin_report import admin_report, admin_usage, report_csv
from gateway.reports.focus import focus_days
from gateway.reports.provider_totals import IN_JSON_ALONE, read_invoices
from gateway.reports.usage_analysis import Analysis, read_analysis, usage_with_analysis
from gateway.reports.usage_period import check_of_all, read_period, read_span
from gateway.reports.usage_report import usage_csv
from gateway.storage.database import Database
from protocol.decoding import decode
from protocol.errors import invalid_param, invalid_value, missing_param
from protocol.serving.deadlines import running_timeout

LONGEST_EXPORT = 400  # days
ASK_WITHIN = 0.5  # seconds that Postgres has where an answer can do without it


@get(
    "/v1/usage",
    guards=[team_or_admin_guard],
    summary="Show a team's usage and cost",
    query=("team_id", "date", "from", "to", "group_by", "format", "compare", "analysis"),
)
async def get_usage(request: AnyRequest) -> Response[bytes] | Response[str]:
    """Show what a team used on a UTC day (``date``; default: today) or from one to another (``from``, ``to``).

    ``group_by``: team, cost_centre, model, key, tier, day, month, user, metadata:KEY, or several of them with commas
    between; by team or cost centre, an admin may leave ``team_id`` out, for all of them. ``format``: json or csv.
    ``analysis=true`` adds dollars per million tokens, the mix of models and what automatic routes saved;
    ``compare=MODEL`` also what the same tokens would have cost there. A team's key sees its own team, an admin's all.
    """
    caller = principal_of(request)
    if isinstance(caller, Caller):
        part_of(request, StoredLimit).take(caller.team.id)
    edition, query = edition_of(request), read_parameters(request)
    asked = read_period(query, part_of(request, Clock).today())
    catalog = edition.catalog
    if isinstance(caller, Caller):
        catalog = catalog.seen_by(caller.team.allowed_models).seen_by(caller.key_models)
    analysis = read_analysis(query, edition.settings, catalog)
    is_csv = _wants_csv(query)
    if is_csv and analysis is not None and asked.group_by and "group_by" in query:
        words = "As CSV, the analysis has a line for each model: leave 'group_by' out, or ask for JSON."
        raise invalid_param("group_by", words)
    team_id = None
    if isinstance(caller, Caller) and asked.is_of_all:
        raise invalid_value("group_by", "names no team here: a team's key sees its own team's usage alone")
    if isinstance(caller, Admin) and "team_id" not in query and asked.is_of_all:
        check_of_all(asked)
    else:
        all_of_them = ", or a 'group_by' with team or cost_centre for all of them"
        team_id = team_in_question(caller, query.get("team_id"), all_of_them)
    async with transaction(request) as connection:
        usage = await usage_with_analysis(
            connection, team_id, asked, analysis, catalog, for_admin=isinstance(caller, Admin) and caller.sees_costs
        )
    return _csv(usage_csv(usage)) if is_csv else answer(usage)


@get(
    "/admin/report",
    guards=[reading_guard],
    summary="Show what all teams used, and what it cost the operator",
    query=("date", "from", "to", "format", "compare", "invoice", "auto"),
)
async def get_report(request: AnyRequest) -> Response[bytes] | Response[str]:
    """Show every team and model on a UTC day (``date``; default: today) or from one to another (``from``, ``to``).

    What was charged and what our own GPUs cost, each replica's idle time, dollars per million tokens, the mix of
    models, what automatic routes saved; with ``compare=MODEL`` what the same tokens would have cost there; the total of
    each provider, with ``invoice=PROVIDER:USD`` (several with commas between) beside what it has invoiced.
    ``auto=false`` leaves out what automatic routes saved, for which calls of days that are not closed are read.
    ``format``: json or csv.
    """
    edition, query = edition_of(request), read_parameters(request)
    first, last = read_span(query, part_of(request, Clock).today())
    analysis = read_analysis(query, edition.settings, edition.catalog) or Analysis(None)
    analysis = replace(analysis, has_auto=read_flag(query, "auto", usual=True))
    is_csv, invoices = _wants_csv(query), read_invoices(query.get("invoice"), edition.catalog)
    if is_csv and invoices:
        raise invalid_value("invoice", IN_JSON_ALONE)
    async with transaction(request) as connection:
        report = await admin_report(connection, analysis, edition.catalog, first, last, invoices)
    return _csv(report_csv(report)) if is_csv else answer(report)


@get(
    "/admin/focus",
    guards=[reading_guard],
    summary="Export what all teams cost in FOCUS 1.4",
    query=("date", "from", "to"),
    media_type="text/csv",
)
async def get_focus(request: AnyRequest) -> Stream:
    """Stream the cost of all teams as CSV in the columns of FOCUS 1.4: a line for each team, model and tier on each UTC
    day from ``from`` to ``to`` (or ``date``; default: today), at most 400 days."""
    edition, database = edition_of(request), part_of(request, Database)
    first, last = read_span(read_parameters(request), part_of(request, Clock).today())
    if (last - first).days >= LONGEST_EXPORT:
        raise invalid_value("from", f"is at most {LONGEST_EXPORT} days before 'to': export a year at a time")
    found = focus_days(database, edition.catalog, first, last)
    head = await anext(found)  # what is wrong with the first day is an error; later ones break the stream

    async def days() -> AsyncIterator[str]:
        yield head
        async for day in found:
            yield day

    attachment = f'attachment; filename="focus-{first}-{last}.csv"'
    return Stream(days(), media_type="text/csv", headers={"content-disposition": attachment})


@get(
    "/admin/usage",
    guards=[reading_guard],
    summary="Show what all teams used, a page of teams at a time",
    query=("date", "from", "to", "after", "limit"),
)
async def get_usage_of_all(request: AnyRequest) -> Response[bytes]:
    """Show every team with what it used on a UTC day (``date``; default: today) or on several (``from``, ``to``).

    ``total`` and ``dearest`` are of all teams, ``data`` goes in the order of their ids: ``after`` is the last id of the
    page before, ``limit`` at most 1000. ``usage_today`` of each is of the UTC day that runs.
    """
    query, limit = read_query(request)
    today = part_of(request, Clock).today()
    first, last = read_span(query, today)
    async with transaction(request) as connection:
        return answer(await admin_usage(connection, first, last, today, after=query.get("after"), limit=limit))


def _wants_csv(query: Mapping[str, str]) -> bool:
    if query.get("format", "json") not in ("json", "csv"):
        raise invalid_value("format", "is json or csv")
    return query.get("format") == "csv"


def _csv(text: str) -> Response[str]:
    return Response(text, media_type="text/csv")


def team_in_question(caller: Caller | Admin, said: str | None, or_else: str = "") -> str:
    """Return the team that a question is about: the caller's own, or the one that an admin names; ``or_else``: what
    else would be right."""
    if isinstance(caller, Caller):
        if said not in (None, caller.team.id):
            raise Forbidden("A team's key sees its own team alone.", param="team_id")
        return caller.team.id
    if said is None:
        raise missing_param("team_id", f"An admin says which team: add 'team_id'{or_else}.")
    return said


@get("/v1/team", guards=[team_guard], summary="Show whose key this is")
async def get_own_team(request: AnyRequest) -> Response[bytes]:
    """Show the team and the key that call, their limits, and what is used, held and left of each budget.

    ``held`` is what running calls may use at the most; ``left`` is null without one. Calls that
    ended in the last two seconds may still be among what is held.
    ``unavailable``: what of the team's budgets lies with gateways that do not answer; null: unknown at the moment.
    """
    caller = caller_of(request)
    team = caller.team
    part_of(request, StoredLimit).take(team.id)
    key, scopes = f"key:{caller.key_id}", team_scopes(team)
    unavailable, of_team, of_key = None, dict[str, Any](budgets=None, model_budgets=None), None
    with contextlib.suppress(*POSTGRES_AWAY):
        async with running_timeout(ASK_WITHIN), transaction(request) as connection:
            room = await silent_room(connection, f"team:{team.id}")
            rooms = await scope_rooms(connection, {**scopes, key: caller.key_limits})
            of_team, of_key = team_budgets_view(team, rooms), budgets_view(rooms[key])
        unavailable = {
            "tokens_today": room.tokens_today,
            "usd_today": dollars(room.nanousd_today),
            "usd_this_month": dollars(room.nanousd_this_month),
        }
    return answer(
        {
            "object": "team",
            "id": team.id,
            "name": team.name,
            "allowed_models": None if team.allowed_models is None else sorted(team.allowed_models),
            "limits": limits_view(team.limits),
            "model_limits": model_limits_view(team.model_limits),
            **value_limits_view(team),
            **of_team,
            "unavailable": unavailable,
            "key": {
                "key_id": caller.key_id,
                "name": caller.key_name,
                "allowed_models": None if caller.key_models is None else sorted(caller.key_models),
                "limits": limits_view(caller.key_limits),
                "budgets": of_key,
                "expires_at": moment_of(caller.expires_at),
            },
        }
    )


@post(
    "/v1/team/key/rotate",
    guards=[team_guard],
    status_code=201,
    summary="Replace the secret of this key",
    takes=OwnRotation | None,
)
async def post_own_rotation(request: AnyRequest) -> Response[bytes]:
    """Give the key that calls another secret, shown this once; the one before works for ``overlap`` (24h, at least 60s)
    beside it. Its id, limits, expiry and what is spent stay. It is rotated again after the overlap."""
    key_id = caller_of(request).key_id
    body = await request.body()
    rotation = decode(body, OwnRotation) if body.strip() else OwnRotation()
    act = own_act(request, f"key:{key_id}")
    pepper, now = edition_of(request).settings.key_pepper, part_of(request, Clock).now()
    async with transaction(request) as connection:
        made = await replace_secret(connection, pepper, key_id, rotation, act, now)
    part_of(request, Authenticator).forget()
    return answer(made_view(made, now_of(request)), 201)
