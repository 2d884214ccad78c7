# What the errors of Postgres mean: that it is away, that it has answered and will not do this, or that a value is at
# fault. And that none of them quotes a value. (Those of Redis: rate_wire.py, which commands without Redis don't load.)

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

# What a transaction may raise while Postgres is away: the driver's own errors arrive as SQLAlchemy's or as OSErrors,
# and a TimeoutError is one.
POSTGRES_AWAY = (SQLAlchemyError, OSError)

# SQLSTATEs of a Postgres that cannot do it now and may later: its connection, a deadlock, no room, an operator, a disk,
# a lock or a row that another transaction has, a server that is read only, a transaction that took too long.
NOT_NOW_IN_POSTGRES = re.compile("08...|40...|53...|57...|58...|55P03|55006|25006|25P03|25P04")

UNKNOWN = ("42P01", "42703", "42883")  # SQLSTATEs: of a table, a column, a function


@contextmanager
def told_if_away(
    log: Any, event: str, *, errors: tuple[type[Exception], ...] = POSTGRES_AWAY, **facts: object
) -> Iterator[None]:
    """Go on behind the block where a store is away: the log has that as ``event``, with these facts."""
    try:
        yield
    except errors as exc:
        log.warning(event, **facts, error=repr(exc))


def postgres_refuses(exc: BaseException) -> bool:
    """Whether Postgres has answered and does not want this: then it has not been done, and may never be."""
    cause = _cause(exc)
    if isinstance(cause, asyncpg.QueryCanceledError):
        return True
    # One that hung up in the middle of something may have done it or not; what others have locked comes free.
    passes = asyncpg.PostgresConnectionError | asyncpg.OperatorInterventionError | asyncpg.LockNotAvailableError
    return isinstance(cause, asyncpg.PostgresError) and not isinstance(cause, passes)


def is_without_schema(exc: BaseException | None) -> bool:
    """Whether a statement failed for a table, a column or a function that a migration makes."""
    return getattr(getattr(exc, "orig", None), "sqlstate", None) in UNKNOWN


def postgres_cannot_now(exc: BaseException) -> bool:
    """Whether Postgres did not do it for a reason that passes."""
    state = getattr(_cause(exc) or exc, "sqlstate", None)
    return state is not None and NOT_NOW_IN_POSTGRES.fullmatch(state) is not None


def drop_values(exc: BaseException) -> None:
    """Take what Postgres quotes of a row or a parameter out of an error and of all behind it, for logs show them.

    A row may hold a prompt or a secret. The error keeps its class and what Postgres says of itself.
    """
    for error in reversed(list(_chain(exc, set()))):
        match error:
            case asyncpg.PostgresError():
                error.detail = error.hint = None
                if isinstance(error, asyncpg.DataError):
                    error.args = ("a value was refused",)
            case DBAPIError() if (cause := _cause(error)) is not None:
                assert error.orig is not None
                error.args = error.orig.args = (f"{type(cause).__name__}: {cause}",)


def _chain(exc: BaseException, seen: set[int]) -> Iterator[BaseException]:
    if id(exc) in seen:
        return
    seen.add(id(exc))
    yield exc
    for behind in (getattr(exc, "orig", None), exc.__cause__, exc.__context__):
        if isinstance(behind, BaseException):
            yield from _chain(behind, seen)


def is_about_a_value(exc: BaseException) -> bool:
    """Whether a value was refused, by Postgres or by what stands before it: trying again cannot help."""
    if not isinstance(exc, DBAPIError):
        return isinstance(exc, StatementError)  # SQLAlchemy itself has no form for it
    return isinstance(_cause(exc), asyncpg.DataError | asyncpg.IntegrityConstraintViolationError)


def _cause(exc: BaseException) -> BaseException | None:
    """Return the driver's own error behind SQLAlchemy's."""
    return exc.orig.__cause__ if isinstance(exc, DBAPIError) and exc.orig is not None else None
