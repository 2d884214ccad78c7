# `tollgate explain REQUEST_ID`: one call from its hold to its price, as a page that a person reads.

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from gateway.commands.command_line import cli_actor, read_settings, run
from gateway.contents.store import PURPOSE, read_contents
from gateway.core.clock import Clock
from gateway.reports.call_list import PROCESS_LOST, show_call
from gateway.storage.encryption import Sealer
from gateway.terminal.options import Where, with_options
from gateway.terminal.printing import Format, printable, say, show, text_of
from gateway.terminal.remote_gateway import remote_gateway

HEAD = (
    *("request_id", "created_at", "team_id", "key_id", "endpoint", "model_asked", "model_used", "provider_endpoint"),
    *("status", "code", "http_status", "limit", "param", "message", "advice", "route_reason", "complexity"),
    *("user_tag", "metadata", "client_request_id", "cost_usd"),
)
PRICE = ("kind", "count", "usd", "cost_usd")
ATTEMPTS = ("target", "outcome", "ms")


@with_options
def command(
    request_id: Annotated[str, typer.Argument(help="The x-request-id of its answer")],
    *,
    contents: Annotated[
        bool, typer.Option("--contents", help="What it asked and got, where its team keeps that")
    ] = False,
    where: Where,
) -> None:
    """Tell all that is known of one call: why it was refused, who answered it, how long each part took, its price."""
    if contents:
        say(msgspec.json.format(msgspec.json.encode(_contents(request_id, where))).decode())
        return
    if where.is_elsewhere:
        with remote_gateway(where.url, where.key) as gateway:
            whose = "/v1" if gateway.address.admin_key is None else "/admin"
            call = gateway.get(f"{whose}/calls/{request_id}")
    else:
        call = run(read_settings(where.config), lambda connection: show_call(connection, request_id))
    told = {name: call[name] for name in HEAD if call.get(name) not in (None, {}, "")}
    if where.format is not Format.TABLE:
        show(where.format, call, list(told), [told], "")
        return
    for name, value in told.items():
        say(f"{name:18} " + printable(text_of(value)))
    if "times_ms" in call:
        _say_row(call)


def _contents(request_id: str, where: Where) -> Any:
    """Return a call's contents; the audit log says who has read them."""
    if where.is_elsewhere:
        with remote_gateway(where.url, where.key) as gateway:
            whose = "/v1" if gateway.address.admin_key is None else "/admin"
            return gateway.get(f"{whose}/calls/{request_id}/contents")
    settings = read_settings(where.config)
    sealer = Sealer(settings.key_pepper, PURPOSE, *settings.other_key_peppers)
    act, now, most = cli_actor(), Clock().moment(), settings.retention.contents
    return run(settings, lambda connection: read_contents(connection, sealer, request_id, act, now, most))


def _say_row(call: Mapping[str, Any]) -> None:
    times = {name: value for name, value in call["times_ms"].items() if value is not None}
    say(f"{'milliseconds':18} " + ", ".join(f"{name} {value:.0f}" for name, value in times.items()))
    held = call["held"]
    say(f"{'held':18} {held['tokens']} tokens, {held['cost_usd']:f} USD")
    for one in call.get("safety", ()):  # none from a gateway of an earlier version
        say(f"{'safety':18} {one['action'].replace('_', ' ')}: {printable(', '.join(one['findings']))}")
    if call["attempts"] or call["code"] == PROCESS_LOST:
        show(Format.TABLE, None, ATTEMPTS, call["attempts"], "Attempts")
    else:
        say(f"{'attempts':18} none: the call ended before an upstream was asked")
    if left_out := call["left_out"]:
        show(Format.TABLE, None, ("model", "codes"), left_out, "Left out of its route, and why")
    if lines := call["price"]["lines"]:
        show(Format.TABLE, None, PRICE, lines, f"Price, tokens by the million (edition {call['price']['edition']})")
