# What libraries say in the log.

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from sqlalchemy.pool import QueuePool

from gateway.telemetry.logging import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), structlog.get_config()
    handlers = root.handlers[:]
    yield
    structlog.configure(**ours)
    root.handlers = handlers


class Frozen:
    """A connection to a database that stands still."""

    def rollback(self) -> None:
        """Do as if nothing were wrong."""

    def close(self) -> None:
        """Meet a deadline."""
        raise TimeoutError("no answer")


def test_a_connection_that_does_not_close_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The pool has closed it all the same: its own traceback tells an operator nothing."""
    configure_logging()
    pool = QueuePool(Frozen)  # type: ignore[arg-type]
    pool.connect().close()
    pool.dispose()
    logging.getLogger("another").error("told as ever")

    [line, other] = capsys.readouterr().err.splitlines()
    assert '"event": "postgres_connection_lost"' in line and "TimeoutError('no answer')" in line
    assert other == "ERROR:another:told as ever"
