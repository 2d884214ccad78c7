# What the errors of Postgres and Redis mean: that a store is away, that it has answered and will not do this, or that a
# value is at fault.

from __future__ import annotations

import re

import asyncpg
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

# What a transaction may raise while Postgres is away: the driver's own errors arrive as SQLAlchemy's or as OSErrors,
# and a TimeoutError is one.
POSTGRES_AWAY = (SQLAlchemyError, OSError)
REDIS_AWAY = (RedisError, OSError)  # and what a call to Redis may raise
STORES_AWAY = (SQLAlchemyError, RedisError, OSError)

# Errors of a Redis that cannot serve now and may later. Any other error is about the command alone.
NOT_NOW = re.compile(
    r"(^|-)(OOM|READONLY|LOADING|MISCONF|BUSY|NOSCRIPT|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|NOAUTH|WRONGPASS|NOPERM"
    r"|MOVED|ASK)\b|^ERR max number of clients"
)


def redis_refuses(exc: BaseException) -> bool:
    """Whether Redis answered, and would answer the same again: an overflow, a key of another type, a faulty script."""
    return type(exc) is ResponseError and NOT_NOW.search(str(exc)) is None


def postgres_refuses(exc: BaseException) -> bool:
    """Whether Postgres has answered and does not want this: then it has not been done, and may never be."""
    cause = _cause(exc)
    if isinstance(cause, asyncpg.QueryCanceledError):
        return True
    return isinstance(cause, asyncpg.PostgresError) and not postgres_hung_up(exc)


def postgres_hung_up(exc: BaseException) -> bool:
    """Whether the connection was lost or ended in the middle of something: what was asked may be done or not."""
    return isinstance(_cause(exc), asyncpg.PostgresConnectionError | asyncpg.OperatorInterventionError)


def is_about_a_value(exc: BaseException) -> bool:
    """Whether a value was refused, by Postgres or by what stands before it: trying again cannot help."""
    if not isinstance(exc, DBAPIError):
        return isinstance(exc, StatementError)  # SQLAlchemy itself has no form for it
    return isinstance(_cause(exc), asyncpg.DataError | asyncpg.IntegrityConstraintViolationError)


def _cause(exc: BaseException) -> BaseException | None:
    """Return the driver's own error behind SQLAlchemy's."""
    return exc.orig.__cause__ if isinstance(exc, DBAPIError) and exc.orig is not None else None
