# What the commands for admins share: which deployment is meant, one transaction in it, faults in words.

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.store_errors import (
    POSTGRES_AWAY,
    is_about_a_value,
    is_without_schema,
    postgres_cannot_now,
    postgres_refuses,
)
from gateway.accounts.schemas import LimitsInput
from gateway.config.file import ConfigFaults, load_settings
from gateway.core.clock import Clock, read_duration
from gateway.core.settings import Settings
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from gateway.terminal.address import is_elsewhere
from gateway.terminal.config_path import LOCAL_CONFIG, find_config
from gateway.terminal.options import Place
from gateway.terminal.printing import fail
from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway, remote_gateway
from protocol.errors import ServiceError

AWAY = "Postgres does not answer: does it run, and does database_url lead there?"
STACK_AWAY = "Postgres does not answer: the stack of .tollgate does not run; `tollgate dev` (or `make demo`) starts it"
NO_LIMIT = ("none", "off", "unlimited")

ALL = 100_000  # teams or keys that are listed, the most
View = dict[str, Any]

T = TypeVar("T")

Models = Annotated[str | None, typer.Option(help="What it may use: names with commas between, or all")]
Count = Annotated[str | None, typer.Option(metavar="N", help="A whole number, or none")]
Usd = Annotated[str | None, typer.Option(metavar="USD", help="Dollars, or none")]


class LimitOptions(Struct, frozen=True, kw_only=True):
    """Limits of a team or a key."""

    requests_per_minute: Count = None
    tokens_per_minute: Count = None
    concurrent_requests: Count = None
    tokens_per_day: Count = None
    usd_per_day: Usd = None
    usd_per_month: Usd = None


def read_settings(config: Path | None) -> Settings:
    """Return the settings of the deployment that is meant, or print every fault and exit 1."""
    path = find_config(config)
    try:
        return load_settings(path)
    except ConfigFaults as exc:
        fail(str(exc))


def run(settings: Settings, act: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Run ``act`` in one transaction and return its result, or say what went wrong and exit 1."""
    try:
        return attempt(settings, act)
    except GatewayFault as exc:
        fail(str(exc), exc.status)


def attempt(settings: Settings, act: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Run ``act`` in one transaction and return its result, or raise GatewayFault."""
    try:
        return asyncio.run(_in_transaction(settings, act))
    except ServiceError as exc:
        raise GatewayFault(exc.message) from exc
    except POSTGRES_AWAY as exc:
        if not (postgres_refuses(exc) or is_about_a_value(exc)):
            raise GatewayFault(STACK_AWAY if _is_stacks(settings) else AWAY, may_pass=True) from exc
        reason = str(getattr(exc, "orig", None) or exc).splitlines() or [type(exc).__name__]
        remedy = "; run `tollgate migrate` first" if is_without_schema(exc) else ""
        raise GatewayFault(
            f"the database did not do it: {reason[0]}{remedy}", may_pass=postgres_cannot_now(exc)
        ) from exc


def _is_stacks(settings: Settings) -> bool:
    """Return whether the database is the one that the stack of this folder runs itself."""
    try:
        is_of_stack = load_settings(LOCAL_CONFIG).database_url == settings.database_url
    except ConfigFaults:
        return False
    return is_of_stack and (LOCAL_CONFIG.parent / "postgres").is_dir()


async def _in_transaction(settings: Settings, act: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    async with open_database(settings) as database, database.begin() as connection:
        return await act(connection)


def carry_out(where: Place, over_http: Callable[[RemoteGateway], T], here: Callable[[Settings], T]) -> T:
    """Return what a gateway answers, where one is meant; else what is found on this deployment's own machine."""
    if not is_elsewhere(where.config, where.url, is_change=True):
        return here(read_settings(where.config))
    with remote_gateway(where.url, where.key) as gateway:
        return over_http(gateway)


def open_database(settings: Settings, application_name: str = "tollgate cli") -> Database:
    """Return a way to Postgres for one command."""
    url, direct_url = settings.database_url, settings.database_direct_url
    return Database(url, direct_url=direct_url, pool_size=1, application_name=application_name)


def cli_actor() -> Act:
    """Return the user of this machine, for the audit log."""
    try:
        return Act(f"cli:{getpass.getuser()}")
    except (KeyError, OSError):  # a container's user may have no name
        return Act(f"cli:{os.getuid()}")


def read_limits(options: LimitOptions) -> LimitsInput:
    """Return the limits among a command's options: those not given stay as they are, `none` for no limit."""
    values: dict[str, Any] = {}
    for name in LimitsInput.__struct_fields__:
        if (said := getattr(options, name)) is not None:
            values[name] = read_limit(f"--{name.replace('_', '-')}", name, said)
    return LimitsInput(**values)


def read_limit(option: str, name: str, said: str) -> Decimal | int | None:
    """Return what an option says of a limit, None for `none`, or say what is wrong and exit 2."""
    words = said.replace("_", "").lower()
    try:
        return Decimal(words) if name.startswith("usd_") else int(words)
    except (ValueError, InvalidOperation):
        if said.lower() not in NO_LIMIT:
            fail(f"{option}: expected a number or none, found {said!r}", 2)
        return None


def read_names(said: str) -> list[str] | None:
    """Return the names that an option says with commas between, None for `all`."""
    return None if said == "all" else [name for name in (part.strip() for part in said.split(",")) if name]


def read_expiry(said: str | None) -> datetime | None:
    """Return the moment that --expires says: a day, a moment, or a time from now."""
    if said is None:
        return None
    if (seconds := read_duration(said)) is not None:
        return Clock().moment() + timedelta(seconds=seconds)
    try:
        moment = datetime.fromisoformat(said)
    except ValueError:
        fail(f"--expires: expected a day, a moment or a duration, such as 2027-01-31 or 90d, found {said!r}", 2)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
