# `tollgate doctor`: everything that a deployment rests on, looked at from this machine; with --live, a provider too.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.config.file import ConfigFaults, load_settings
from gateway.config.offers import all_priced
from gateway.core.settings import Settings
from gateway.doctor.findings import Finding, State, fault, ok, warning
from gateway.doctor.machine import look_at_machine
from gateway.doctor.stores import look_at_postgres, look_at_redis
from gateway.doctor.upstreams import look_at_issuers, look_at_upstreams
from gateway.terminal.address import KeyOption, UrlOption, is_elsewhere
from gateway.terminal.config_path import ConfigOption, find_config
from gateway.terminal.printing import counted, fail, printable, say
from gateway.terminal.remote_gateway import RemoteGateway, remote_gateway

LOOKS: tuple[Callable[[Settings], Coroutine[Any, Any, list[Finding]]], ...]
LOOKS = (look_at_postgres, look_at_redis, look_at_upstreams, look_at_issuers)


def command(
    providers: Annotated[list[str] | None, typer.Argument(help="With --live: these; default: all with a key")] = None,
    live: Annotated[bool, typer.Option("--live", help="Make small calls at each provider, for cents")] = False,
    most_usd: Annotated[
        str, typer.Option(metavar="USD", help="With --live: the most that a provider may cost")
    ] = "0.05",
    model: Annotated[str | None, typer.Option(help="With --live: what to call; default: the cheapest")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="With --live: the folder for the answers, without secrets; default: recordings"),
    ] = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Say of everything that a deployment rests on whether it is well, and what to do; exit 1 where something is not.

    Over HTTP it says what a gateway knows of itself. Without --live no call is made that costs anything.
    """
    if live:
        from gateway.doctor.live import look_live

        settings = _settings(config)
        try:
            cap = Decimal(most_usd)
        except ArithmeticError:
            cap = Decimal(-1)
        if not (cap.is_finite() and cap >= 0):
            fail(f"--most-usd is an amount in dollars, such as 0.05; found {most_usd!r}", 2)
        raise typer.Exit(_tell(asyncio.run(look_live(settings, providers or [], model, cap, record))))
    if providers:
        fail("a provider is named with --live alone: tollgate doctor --live " + " ".join(providers), 2)
    if is_elsewhere(config, url):
        with remote_gateway(url, key) as gateway:
            raise typer.Exit(_tell(list(_look_from_afar(gateway))))
    raise typer.Exit(_tell(_look_here(find_config(config))))


def _look_here(path: Path) -> list[Finding]:
    try:
        settings = load_settings(path)
    except ConfigFaults as exc:
        for each in exc.lines():
            say(fault("configuration", each, "").line())
        fail("the rest rests on it: correct it first")
    return [*_configuration(path, settings), *look_at_machine(settings), *asyncio.run(_look_outside(settings))]


async def _look_outside(settings: Settings) -> list[Finding]:
    return [finding for found in await asyncio.gather(*(look(settings) for look in LOOKS)) for finding in found]


def _configuration(path: Path, settings: Settings) -> Iterator[Finding]:
    models = f"{counted(len(settings.models), 'model')} at {counted(len(settings.providers), 'provider')}"
    yield ok("configuration", f"{path}: {models}")
    for one in settings.left_out:
        yield warning("configuration", one.line(), "set its key, or take it out of the file")
    for provider in settings.providers.values():
        if unpriced := all_priced(provider)[1]:
            words = f"{provider.name}: {len(unpriced)} models have no known price and are not offered"
            yield warning("configuration", words, "name them under `models`, each with its price, if they are needed")


def _look_from_afar(gateway: RemoteGateway) -> Iterator[Finding]:
    """Yield what a gateway says of itself, and, to admins, of its breakers and replicas."""
    health = gateway.get("/health/ready")
    yield ok("gateway", f"{gateway.address.url} is {health['status']}")
    for part, said in health["parts"].items():
        remedy = "run `tollgate doctor` on its machine; docs/operations/faults.md tells what each fault looks like"
        yield ok(part, "ok") if said == "ok" else fault(part, str(said), remedy)
    yield ok("models", f"{len(gateway.get('/v1/models')['data'])} names that this key may ask for")
    if gateway.address.admin_key is None:
        return
    away = [one for one in gateway.get("/admin/breakers")["breakers"] if one["state"] == "open"]
    for one in away:
        words = f"open since {one['opened_at']}: {one['reason'] or 'failures'}"
        yield fault(f"breaker {one['model']}", words, "look at the provider; `tollgate breakers` tells all of them")
    if not away:
        yield ok("breakers", "none is open")
    for one in gateway.get("/admin/instances")["instances"]:
        part, words = f"engine {one['instance_id']}", f"{one['running']} run, {one['queue_depth']} wait"
        yield warning(part, f"not seen since {one['seen_at']}", "is it gone?") if one["stale"] else ok(part, words)


def _settings(config: Path | None) -> Settings:
    try:
        return load_settings(find_config(config))
    except ConfigFaults as exc:
        fail(str(exc))


def _tell(found: list[Finding]) -> int:
    """Print what was found, and return the exit status."""
    for finding in found:
        say(printable(finding.line()))
    counts = {state: sum(finding.state is state for finding in found) for state in State}
    say(f"{counts[State.OK]} well, {counts[State.WARNING]} warnings, {counts[State.FAULT]} faults")
    return int(counts[State.FAULT] > 0)
