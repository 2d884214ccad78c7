# What `tollgate doctor` looks at in Postgres and Redis: whether they answer, the schema, their clocks, what Redis would
# throw away, and processes that hold budgets and do not answer.

from __future__ import annotations

import time

import asyncpg
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ResponseError

from billing.core.store_errors import POSTGRES_AWAY
from billing.quotas.rate_wire import REDIS_AWAY
from billing.upkeep.owner import ASTRAY
from billing.upkeep.owner_list import silent_owners
from gateway.core.settings import Settings
from gateway.doctor.findings import Finding, fault, ok, warning
from gateway.storage.database import Database
from gateway.storage.schema import DRIVER_ERRORS, NEEDED
from protocol.serving.redis_client import open_redis

WITHIN = 3.0  # seconds that each answer may take
CLOCK = "set the machines' clocks by one source (chrony, systemd-timesyncd)"


async def look_at_postgres(settings: Settings) -> list[Finding]:
    """Return whether Postgres can be used, has this version's schema and our time, and what silent owners hold."""
    try:
        connection = await asyncpg.connect(settings.database_url, timeout=WITHIN)
    except asyncpg.InvalidAuthorizationSpecificationError as exc:
        return [fault("postgres", f"refuses the user or the password of database_url: {exc}", "correct database_url")]
    except asyncpg.InvalidCatalogNameError as exc:
        return [fault("postgres", str(exc), "create it (createdb), or correct database_url")]
    except (OSError, TimeoutError, *DRIVER_ERRORS) as exc:
        words = f"does not answer: {exc or type(exc).__name__}"
        return [fault("postgres", words, "start it, or correct database_url; is there a firewall between?")]
    try:
        began = time.perf_counter()
        version, now = await connection.fetchrow(
            "SELECT current_setting('server_version'), extract(epoch FROM clock_timestamp())::float8", timeout=WITHIN
        )
        ended = time.perf_counter()
        found = [ok("postgres", f"{version}, answers in {1000 * (ended - began):.1f} ms")]
        try:
            schema = str(await connection.fetchval("SELECT version_num FROM alembic_version", timeout=WITHIN))
        except asyncpg.UndefinedTableError:
            schema = ""
        found += [_schema(schema), _clock("clock, Postgres", now - time.time())]
        return [*found, await _owners(settings)] if schema else found
    except (OSError, TimeoutError, *DRIVER_ERRORS) as exc:
        return [fault("postgres", f"broke off: {exc or type(exc).__name__}", "look into its log")]
    finally:
        connection.terminate()


async def look_at_redis(settings: Settings) -> list[Finding]:
    """Return whether Redis can be used, keeps what it is given, and has our time."""
    redis = open_redis(settings.redis_url, timeout=WITHIN)
    try:
        began = time.perf_counter()
        seconds, micros = await redis.time()
        took = time.perf_counter() - began
        known = await redis.info("server")
        version = known.get("valkey_version") or known.get("redis_version", "")
        found = [ok("redis", f"{version}, answers in {1000 * took:.1f} ms")]
        found.append(_clock("clock, Redis", seconds + micros / 1e6 - time.time()))
        return [*found, *await _eviction(redis)]
    except AuthenticationError as exc:
        return [fault("redis", f"refuses the user or the password of redis_url: {exc}", "correct redis_url")]
    except REDIS_AWAY as exc:
        words = f"does not answer: {exc or type(exc).__name__}"
        remedy = "start it, or correct redis_url; until then limits by the minute are counted by each process alone"
        return [fault("redis", words, remedy)]
    finally:
        await redis.aclose()


def _schema(found: str) -> Finding:
    if found == NEEDED:
        return ok("migrations", f"schema {found}")
    if found > NEEDED:
        return warning(
            "migrations", f"schema {found} is newer than this version's {NEEDED}", "install the newer version"
        )
    return fault(
        "migrations", f"schema {found or 'missing'}, and this version needs {NEEDED}", "run `tollgate migrate`"
    )


def _clock(part: str, ahead: float) -> Finding:
    """``ahead``: seconds by which the other clock is ahead of ours."""
    if abs(ahead) <= ASTRAY:
        return ok(part, f"{abs(ahead):.1f} s apart")
    words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    return fault(part, f"{words}: no new day of budgets is opened", CLOCK)


async def _owners(settings: Settings) -> Finding:
    database = Database(settings.database_url, pool_size=1, application_name="tollgate doctor")
    try:
        async with database.begin() as connection:
            silent = await silent_owners(connection)
    except POSTGRES_AWAY as exc:
        return warning("owners", f"cannot be read: {str(exc).splitlines()[0]}", "run `tollgate migrate`")
    finally:
        await database.close()
    if silent:
        remedy = (
            "start them where their journals lie; `tollgate owners` lists them, and retires one whose journal is lost"
        )
        return warning("owners", f"{silent} processes hold budgets and do not answer", remedy)
    return ok("owners", "every process that holds budgets answers")


async def _eviction(redis: Redis) -> list[Finding]:
    try:
        policy = (await redis.config_get("maxmemory-policy")).get("maxmemory-policy", "noeviction")
    except ResponseError:  # a service in a cloud may not tell
        return []
    if policy == "noeviction":
        return []
    words = f"throws keys away when it is full ({policy}): a counter that is gone is a limit that is gone"
    return [warning("redis, memory", words, "CONFIG SET maxmemory-policy noeviction")]
