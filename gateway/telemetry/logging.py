# Structured logs: one JSON object a line on standard error, each with the request's id where there is one.

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging() -> None:
    """Send our logs, and the warnings of the libraries, to standard error as JSON lines."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
    logging.getLogger().handlers[0].addFilter(_tell_in_a_line)


def _tell_in_a_line(record: logging.LogRecord) -> bool:
    """Tell what the pool of connections to Postgres met as it closed one, without a traceback of the pool's own; let
    every other record through."""
    if not (record.name.startswith("sqlalchemy.pool") and record.exc_info):
        return True
    words = record.getMessage()
    structlog.get_logger().warning("postgres_connection_lost", said=words, error=repr(record.exc_info[1]))
    return False
