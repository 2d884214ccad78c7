# Fixtures that more than one suite leans on: real servers, one of each per test process, started when first needed.

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import structlog

from tests.support.clock import SetClock
from tests.support.longest import GROUPS, SECONDS, group_of, seconds_of
from tests.support.reporting import pytest_runtest_protocol
from tests.support.rewriting import do_share
from tests.support.soak_table import pytest_runtest_logreport, pytest_sessionfinish, pytest_sessionstart
from tests.support.whole_files import pytest_configure_node, pytest_make_collect_report

if TYPE_CHECKING:  # a second, in which the process that starts the others has nothing to do with them
    from redis.asyncio import Redis

    from gateway.storage.database import Database
    from tests.support.databases import Databases

__all__ = [
    "pytest_configure_node",
    "pytest_make_collect_report",
    "pytest_runtest_logreport",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_sessionstart",
]  # hooks


# What an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("tollgate", deadline=None, max_examples=30)
hypothesis.settings.load_profile("tollgate")

# Each HTTP client would read all certificate authorities again, for 50 ms of CPU, to speak to a loopback without TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Gateways run in threads of a test process: what they log is none of the output of a command that a test reads.
# Their tracebacks are plain: one with all variables takes a tenth of a second of the loop that logs it.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ],
    logger_factory=structlog.PrintLoggerFactory(sys.__stderr__),
)

# Of as many threads as there are cores, in each of many processes, all but one wait for the others at full speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Commands print tables where it is set and lines with tabs into a pipe where it is not: a test says which it reads. It
# is set in some shells, and by readline wherever that was imported.
os.environ.pop("COLUMNS", None)

# Run behind a shell's `&`, SIGINT is ignored, by every process that a test starts as well; some are to end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent


def pytest_configure() -> None:
    """Leave the collector out while thousands of modules are imported: they stay, and going through them costs 2 s."""
    gc.disable()


def pytest_collection(session: pytest.Session) -> None:
    """Do what takes long on a fresh checkout together with the processes beside this one."""
    do_share(session.config)


def pytest_collection_finish() -> None:
    """From here on look at what tests leave behind, not at what was imported for good."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that the processes end at about the same time."""
    assert not (gone := [path for path in {**SECONDS, **GROUPS} if not (ROOT / path).exists()]), gone
    times = {path: seconds_of(group_of(path.relative_to(ROOT).as_posix())) for path in {item.path for item in items}}
    items.sort(key=lambda item: -times[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where files go to processes, some go together."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.scheduling import LoadGroupScheduling

    return LoadGroupScheduling(config, log)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, as the house does, whatever else is installed."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real Postgres: the URL of a database on the newest schema, shared by the session."""
    from tests.support import servers

    with servers.postgres() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Valkey, shared by the session."""
    from tests.support import servers

    with servers.valkey() as url:
        yield url


@pytest.fixture(scope="session")
def databases(postgres_url: str) -> Iterator[Databases]:
    """Lends databases to tests."""
    from tests.support.databases import Databases

    databases = Databases(postgres_url)
    yield databases
    databases.close()


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """A database of the test's own, on the newest schema, with no rows; the partitions of coming days are there."""
    with databases.lend() as url:
        yield url


@pytest.fixture
def new_database_url(postgres_url: str) -> Iterator[str]:
    """A database of the test's own as the migrations leave it, without the partition of any day."""
    from tests.support import servers

    with servers.database_of_its_own(postgres_url) as url:
        yield url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The way into a database of the test's own."""
    from gateway.storage.database import Database

    database = Database(database_url)
    yield database
    await database.close()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty Valkey."""
    from redis.asyncio import Redis

    client: Redis = Redis.from_url(redis_url, socket_timeout=10.0)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def signals() -> Iterator[None]:
    """Block what was blocked before, once a command that blocks signals has run in this process: what later tests start
    would never hear of its SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def clock() -> SetClock:
    """A clock that stands at noon until the test moves it."""
    return SetClock()
