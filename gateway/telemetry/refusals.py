# The trace of a call that is refused: one log line with who asked for what, and why it was refused; never a prompt, a
# key or any other words of the caller's. A flood of refusals is told by its first lines of each second and a count; so
# is what is kept of it for the team that asks why.

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, MutableMapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

import structlog
from litestar.connection import ASGIConnection

from billing.core.ids import moment_of
from billing.ledger.series import MINUTE
from billing.ledger.series_queries import REFUSED
from gateway.accounts.guards import read_key
from gateway.core.keys import KEY_PREFIX, shown_prefix
from gateway.core.principals import Admin, Caller
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.errors import ServiceError
from router.catalog.catalog import Catalog

ALIKE = 5  # lines a second of one team, key and code
IN_ALL = 100  # lines a second of this process
AN_HOUR = 500  # refusals of one team that are kept for it
LONGEST = 500  # characters of a message
TOLD = frozenset({429, 503})  # statuses whose messages are kept whole: others may quote what was asked
COUNTED = 20  # of those that were left out, how many are named with their count

log = structlog.get_logger()

Kind = tuple[str, str, str]  # team, key, code


class Refusals:
    """Counts and logs every error that a request is answered with.

    ``keep`` is given those of a team's own calls to ``endpoints`` (path to name), as rows of ``refused_calls``. Of the
    fields at fault these name the ones in ``fields``. ``count`` is given how many there were, as rows of
    ``usage_series``, a second's together.
    """

    def __init__(
        self,
        metrics: Metrics,
        catalog: Catalog,
        endpoints: Mapping[str, str] = MappingProxyType({}),
        fields: Container[str] = (),
        keep: Callable[[dict[str, Any]], None] = lambda row: None,
        count: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        self._metrics = metrics
        self._endpoints = endpoints
        self._fields = fields
        self._keep = keep
        self.on_kept: Callable[[dict[str, Any]], None] | None = None  # is told what is kept, while something listens
        self._count = count
        self._counted: Counter[tuple[datetime, str, str, str, str]] = Counter()  # since the last turn
        self._alike: Counter[Kind] = Counter()  # kept in this second,
        self._kept: Counter[str] = Counter()  # and by team in this hour
        self._turns = 0
        self._logged: Counter[Kind] = Counter()  # in this second,
        self._lines = 0  # all together
        self._left_out: Counter[Kind] = Counter()
        self.follow(catalog)

    def follow(self, catalog: Catalog) -> None:
        """Go by the models of another configuration."""
        self._names = frozenset(catalog.names())

    def note(self, scope: MutableMapping[str, Any], error: ServiceError) -> None:
        """Count and log that the request of ``scope`` is answered with ``error``, by status or in a stream.

        ``scope["state"]`` has ``caller``, ``model_asked`` or ``tool_asked``, and the client's ``address`` where these
        are known.
        """
        state = scope["state"]
        state["is_noted"] = True
        caller = state.get("caller")
        self._metrics.count_refusal(caller, error)
        code = error.code or str(error.status)
        kind = (caller.team.id, caller.key_id, code) if isinstance(caller, Caller) else ("", "", code)
        if isinstance(caller, Caller) and scope.get("path_template") in self._endpoints:
            if not isinstance(error, UpstreamFailure):
                minute = datetime.fromtimestamp(moment_of(state["request_id"]) // 60_000 * 60, UTC)
                self._counted[minute, *kind, self._model(state) or ""] += 1
            self._keep_for(caller, scope, error, kind)
        if self._logged[kind] >= ALIKE or self._lines >= IN_ALL:
            self._left_out[kind] += 1
            return
        self._logged[kind] += 1
        self._lines += 1
        outcome = {"outcome": error.outcome} if isinstance(error, UpstreamFailure) else {}
        log.info(
            "call_failed" if outcome else "call_refused",
            request_id=state.get("request_id", ""),
            **_who(scope, caller),
            model=self._model(state),
            endpoint=scope.get("path_template", "unknown"),
            status=error.status,
            code=code,
            **({"limit": error.limit} if error.limit else {}),
            **outcome,
        )

    def turn(self) -> None:
        """Begin another second, and tell how many lines the last one left out."""
        if self._left_out:
            named = self._left_out.most_common(COUNTED)
            most = [{"team": team, "key": key, "code": code, "count": count} for (team, key, code), count in named]
            log.warning("refusals_left_out", count=self._left_out.total(), most=most)
            self._left_out.clear()
        for (minute, team, key, code, model), count in self._counted.items():
            usual = {"step": MINUTE, "provider": "", "status": REFUSED, "tier": "", "route_reason": ""}
            which = {"at": minute, "team_id": team, "key_id": key, "model_used": model, "code": code}
            self._count(usual | which | {"calls": count})
        self._counted.clear()
        self._logged.clear()
        self._alike.clear()
        self._lines = 0
        self._turns += 1
        if self._turns % 3600 == 0:
            self._kept.clear()

    async def run(self) -> None:
        """Turn every second, until cancelled."""
        try:
            while True:
                await asyncio.sleep(1.0)
                self.turn()
        finally:
            self.turn()

    def _keep_for(self, caller: Caller, scope: MutableMapping[str, Any], error: ServiceError, kind: Kind) -> None:
        """Keep a refusal for the team that it was told: so many alike a second and in all an hour."""
        endpoint = self._endpoints[scope["path_template"]]
        if self._kept[caller.team.id] >= AN_HOUR or self._alike[kind] >= ALIKE:
            return
        self._alike[kind] += 1
        self._kept[caller.team.id] += 1
        message = error.message if error.status in TOLD else error.kept
        if isinstance(error, UpstreamFailure):
            message = None
        row = {
            "request_id": UUID(scope["state"]["request_id"]),
            "team_id": caller.team.id,
            "key_id": caller.key_id,
            "endpoint": endpoint,
            "model_asked": self._model(scope["state"]),
            "http_status": error.status,
            "code": kind[2],
            "param": self._field(error.param),
            "limit_name": error.limit or None,
            "message": message and message[:LONGEST],
        }
        self._keep(row)
        if self.on_kept is not None and not isinstance(error, UpstreamFailure):  # of that there is a call
            self.on_kept(row)

    def _field(self, param: str | None) -> str | None:
        """Return the field that a fault lies in, as the API names it: ``messages`` of ``messages[0].content``."""
        name = "" if param is None else re.split(r"[.\[]", param, maxsplit=1)[0]
        return name if name in self._fields else None

    def _model(self, state: MutableMapping[str, Any]) -> str | None:
        """Return the model that was asked for: of names that are not in the catalogue only that there is one. A tool of
        an MCP server by the ledger's name for it."""
        if (tool := state.get("tool_asked")) is not None:
            return str(tool)
        asked = state.get("model_asked")
        return asked if asked is None or asked in self._names else "unknown"


def _who(scope: MutableMapping[str, Any], caller: object) -> dict[str, str]:
    """Return who asked: a team by its key, an admin, or an address with the beginning of a key that is none."""
    if isinstance(caller, Caller):
        return {"team": caller.team.id, "key": caller.key_id}
    if isinstance(caller, Admin):
        return {"admin": caller.fingerprint}
    key = read_key(ASGIConnection(scope)) or ""  # type: ignore[arg-type]
    address = scope["state"].get("address") or (scope["client"][0] if scope.get("client") else "")
    who = {"address": address} if address else {}
    return who | ({"key_prefix": shown_prefix(key)} if key.startswith(KEY_PREFIX) else {})
