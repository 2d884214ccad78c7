# `tollgate usage`: the report of GET /v1/usage, or without a team that of GET /admin/report, as tables, JSON or CSV;
# over HTTP, or on a deployment's own machine from Postgres directly.

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import date as Day
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from gateway.commands.command_line import read_settings, run
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.reports.admin_report import admin_report, report_csv
from gateway.reports.provider_totals import IN_JSON_ALONE, Invoices, read_invoices
from gateway.reports.usage_analysis import Analysis, read_analysis, usage_with_analysis
from gateway.reports.usage_period import OF_ALL, check_of_all, read_period, read_span
from gateway.reports.usage_report import usage_csv, usage_rows
from gateway.terminal.options import Where, with_options
from gateway.terminal.printing import Format, is_for_people, say, show
from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway, remote_gateway
from protocol.errors import BadRequest

ALWAYS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens", "cost_usd")
UNSHOWN = ("team_id", "date", "cost_usd_exact")  # in the title, or said: a table has every digit of cost_usd
OF_MODELS = ("requests", "input_tokens", "output_tokens", "cost_usd", "usd_per_million_tokens")
OF_GPUS = ("gpu_cost_usd", "gpu_usd_per_million_tokens")
SHARES = ("share_of_requests", "share_of_cost")
OF_PROVIDERS = (
    *("provider", "requests", "input_tokens", "output_tokens", "cost_usd"),
    *("invoice_usd", "difference_usd", "difference_percent"),
)
INVOICE_OF_ALL = "--invoice is beside the total of all teams: leave --team out, and use an admin's key"
GROUPS_OF_ALL = "--group-by needs a --team, or team or cost_centre among its groups"
OF_INSTANCES = ("instance_id", "model", "gpus", "hours", "busy_hours", "cost_usd", "calls_usd", "idle_usd")


@with_options
def command(
    *,
    team: Annotated[str | None, typer.Option(help="Whose usage; default: the whole deployment")] = None,
    date: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="A UTC day; default: today")] = None,
    since: Annotated[str | None, typer.Option("--from", metavar="YYYY-MM-DD", help="The first day of several")] = None,
    to: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="The last day; default: today")] = None,
    group_by: Annotated[
        str | None,
        typer.Option(metavar="team|cost_centre|model|key|tier|day|month|user|metadata:KEY", help="A line for each"),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="MODEL", help="What the same tokens would have cost at this model")
    ] = None,
    analysis: Annotated[bool, typer.Option("--analysis", help="Cost per million tokens, and which models")] = False,
    invoice: Annotated[
        str | None,
        typer.Option(metavar="PROVIDER:USD", help="A provider's total beside its invoice; several with commas between"),
    ] = None,
    where: Where,
) -> None:
    """Show what a team used and what it costs; without --team, what all teams used and what it cost the operator.

    With a team's key it is that team's, with or without --team.
    """
    given = {"date": date, "from": since, "to": to, "group_by": group_by, "compare": compare, "invoice": invoice}
    said = {name: value for name, value in given.items() if value is not None}
    if where.is_elsewhere:
        with remote_gateway(where.url, where.key) as gateway:
            _show_remote(gateway, team, said | ({"analysis": "true"} if analysis else {}), where.format)
        return
    settings = read_settings(where.config)
    try:
        wanted = read_analysis(said | ({"analysis": "true"} if analysis else {}), settings, settings.catalog())
        if team is not None and invoice is not None:
            raise BadRequest(INVOICE_OF_ALL)
        if where.format is Format.CSV and invoice is not None:
            raise BadRequest(f"--invoice {IN_JSON_ALONE}")
        if team is None:
            if group_by is not None:
                check_of_all(asked := read_period(said, Clock().today()))
                if not asked.is_of_all:
                    raise BadRequest(GROUPS_OF_ALL)
                _show_team(settings, None, said, wanted, where.format)
                return
            invoices = read_invoices(invoice, settings.catalog())
            span = read_span(said, Clock().today())
            _show_deployment(settings, wanted or Analysis(None), invoices, *span, where.format)
        else:
            _show_team(settings, team, said, wanted, where.format)
    except BadRequest as exc:
        raise typer.BadParameter(exc.message) from exc


def _show_team(
    settings: Settings, team: str | None, said: Mapping[str, str], wanted: Analysis | None, format: Format
) -> None:
    asked = read_period(said, Clock().today())
    if format is Format.CSV and wanted is not None and "group_by" in said:
        raise BadRequest("As CSV, the analysis has a line for each model: leave --group-by out.")

    catalog = settings.catalog()
    usage = run(
        settings, lambda connection: usage_with_analysis(connection, team, asked, wanted, catalog, for_admin=True)
    )
    if format is Format.CSV:
        sys.stdout.write(usage_csv(usage))  # to the byte as over HTTP
        return
    _print_team(usage, format)


def _show_remote(gateway: RemoteGateway, team: str | None, said: Mapping[str, str], format: Format) -> None:
    """Ask for a team's report, or with an admin key and no team for that of all, and print it."""
    is_of_all = team is None and gateway.address.admin_key is not None
    if not is_of_all and "invoice" in said:
        raise GatewayFault(INVOICE_OF_ALL)
    is_report = is_of_all and "group_by" not in said
    if is_of_all and not is_report:
        if set(OF_ALL).isdisjoint(said["group_by"].split(",")):
            raise GatewayFault(GROUPS_OF_ALL)
        gateway = RemoteGateway(replace(gateway.address, team_key=None))  # a team's key sees its own team alone
    path = "/admin/report" if is_report else "/v1/usage"
    query = {name: value for name, value in said.items() if not (is_report and name == "analysis")}
    query |= {} if team is None else {"team_id": team}
    if format is Format.CSV:
        for piece in gateway.content(path, format="csv", **query):
            sys.stdout.write(piece.decode())
    elif is_report:
        _print_deployment(gateway.get(path, **query), *read_span(said, Clock().today()), format)
    else:
        _print_team(gateway.get(path, **query), format)


def _print_team(usage: Mapping[str, Any], format: Format) -> None:
    columns, rows = usage_rows(usage)
    if "results" in usage:
        groups = [name for name in columns if name in usage["group_by"].split(",")]
        columns = [name for name in columns if name not in ("team_id", "from", "to")]
        rows = [_named(row, groups) for row in rows]
        rows.append({columns[0]: "total", **usage["total"]})
    else:
        groups = []
    columns, rows = [*columns, "corrections_usd"], [_with_corrections(row) for row in rows]
    span = usage.get("date") or f"{usage['from']} to {usage['to']}"
    whose = usage["team_id"] or "all teams"
    title = f"Usage of {whose}, {span} (UTC){'' if usage['is_closed'] else ', not closed yet'}"
    columns = [name for name in columns if name in (*ALWAYS, *groups) or any(row.get(name) for row in rows)]
    if format is Format.TABLE and "analysis" in usage and not is_for_people(format):
        _show_models(usage["analysis"])
        return
    show(format, usage, [name for name in columns if name not in UNSHOWN], rows, title)
    if is_for_people(format):
        _say_corrections(usage.get("corrections") or usage.get("total", {}).get("corrections"))
        if "analysis" in usage:
            _show_analysis(usage["analysis"])


def _show_deployment(
    settings: Settings, analysis: Analysis, invoices: Invoices, first: Day, last: Day, format: Format
) -> None:
    catalog = settings.catalog()
    report = run(settings, lambda connection: admin_report(connection, analysis, catalog, first, last, invoices))
    if format is Format.CSV:
        sys.stdout.write(report_csv(report))
        return
    _print_deployment(report, first, last, format)


def _print_deployment(report: Mapping[str, Any], first: Day, last: Day, format: Format) -> None:
    rows = [*(_named(line, ["model"]) for line in report["results"]), {"team_id": "total", **report["total"]}]
    columns = ["team_id", "model", *OF_MODELS, *_gpus(report), *_compared(report), *SHARES]
    columns += ["corrections_usd"] if any(row.get("corrections_usd") for row in rows) else []
    title = f"Usage of all teams, {first} to {last} (UTC){'' if report['is_closed'] else ', not closed yet'}"
    has_invoices = any("invoice_usd" in line for line in report["providers"])
    if format is not Format.TABLE or is_for_people(format) or not has_invoices:
        show(format, report, columns, rows, title)
    if is_for_people(format):
        _show_analysis(report)
    if format is Format.TABLE and has_invoices:
        lines = [_named(line, ["provider"]) for line in report["providers"]]
        show(format, report, OF_PROVIDERS, lines, "By provider, corrections included, beside invoices")
    if is_for_people(format) and report["instances"]:
        lines = [*report["instances"], {"instance_id": "total", **report["instances_total"]}]
        show(format, report, OF_INSTANCES, lines, "What our own engines cost: calls and idle time")


def _show_models(analysis: Mapping[str, Any]) -> None:
    rows = [*(_named(line, ["model"]) for line in analysis["models"]), {"model": "total", **analysis["total"]}]
    columns = ["model", *OF_MODELS, *_gpus(analysis), *_compared(analysis), *SHARES]
    show(Format.TABLE, None, columns, rows, "By model, corrections included")


def _show_analysis(analysis: Mapping[str, Any]) -> None:
    _show_models(analysis)
    if compare := analysis.get("compare"):
        say(
            f"At {compare['model']} the same tokens would have cost {compare['cost_usd']:f} USD: "
            f"{compare['difference_usd']:+f} USD."
        )
    if (auto := analysis["auto"]) and auto["requests"]:
        say(
            f"Automatic routes answered {auto['requests']} requests for {auto['cost_usd']:f} USD instead of "
            f"{auto['large_cost_usd']:f} USD at their first large models: {auto['saved_usd']:f} USD saved."
        )
    if (missed := analysis["would_have_saved"]) and missed["estimated_usd"] is not None:
        say(
            f"Of {missed['requests']} requests that named a large model for {missed['cost_usd']:f} USD, an automatic "
            f"route would have saved about {missed['estimated_usd']:f} USD "
            f"(an estimate from {missed['sample_requests']} of them)."
        )


def _with_corrections(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose sums hold what was booked late or by hand, as those of all teams do, and how much that is."""
    late = row.get("corrections", {"cost_usd": 0})
    sums = {name: row[name] + more for name, more in late.items() if name in row and not isinstance(more, str)}
    return row | sums | {"corrections_usd": late["cost_usd"]}


def _say_corrections(late: Mapping[str, Any] | None) -> None:
    if late:
        what = f"{late['requests']} requests after the day was closed, {late['entries']} entries booked by people"
        say(f"Of the cost, corrections: {late['cost_usd']:f} USD ({what}).")


def _named(row: dict[str, Any], groups: list[str]) -> dict[str, Any]:
    """Return a row in which a line for many or for none says so."""
    words = f"{row['others']} others" if row.get("others") else "(none)"
    return row | {name: words for name in groups if row[name] is None}


def _gpus(report: Mapping[str, Any]) -> tuple[str, ...]:
    return OF_GPUS if report["total"].get("gpu_cost_usd") else ()


def _compared(report: Mapping[str, Any]) -> tuple[str, ...]:
    return ("compared_cost_usd",) if "compare" in report else ()
