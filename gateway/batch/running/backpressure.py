# Backpressure on batches at commercial models: a batch slows where interactive calls wait longer for their first
# token, or are rate limited more often, than is usual there. Our own engine does this itself, by tiers.
#
# The baseline time comes from the better samples of the last hour, much as LEDBAT's base delay (RFC 6817): an hour with
# batches in it does not raise it. Waiting times come from the ledger; the hot path pays nothing.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import structlog
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import least_id
from gateway.batch.running.adaptive_concurrency import ConcurrencyLimits
from gateway.core.clock import Clock

WINDOW = 60.0  # seconds of calls that are the present
SAMPLE_SECONDS = 300.0  # seconds; twelve of them are the hour that tells what is usual
SAMPLES = 12
MOST_CALLS = 5000  # read of one sample
LEARN_EVERY = SAMPLE_SECONDS  # seconds between looks at the hour
LEAST_CALLS = 10  # that a ninth decile rests on
RISE = 1.5  # times the baseline time is too long
FLOOR_MS = 100.0  # a baseline time below it counts as this: less is not noticeable
RISE_OF_REFUSALS = 0.01  # of all tries, beyond twice the baseline share
LEAST_REFUSALS = 2
FORGET = 300.0  # seconds after its last use when a concurrency group no longer counts at a target
STREAMED_MS = 5.0  # from the first token to the end; an answer that came whole has no first token to speak of


log = structlog.get_logger(__name__)


class LatencySample(Struct, frozen=True, kw_only=True):
    """What interactive calls met at one target in a while."""

    target: str  # Target.key
    calls: int  # with a time to first token
    p90_ms: float | None  # of their times to the first token; None without any
    tries: int
    refused: int  # of these, by a rate limit


class Baseline(Struct, frozen=True):
    """What is usual at a target. ``p90_ms``: None while too little is known."""

    p90_ms: float | None = None
    refusals: float = 0.0  # of all tries


def baseline_of(samples: Iterable[LatencySample]) -> Baseline:
    """Return what is usual by the better samples: the lower quartile of each measure."""
    known = list(samples)
    times = sorted(one.p90_ms for one in known if one.p90_ms is not None and one.calls >= LEAST_CALLS)
    shares = sorted(one.refused / one.tries for one in known if one.tries >= LEAST_CALLS)
    return Baseline(times[len(times) // 4] if times else None, shares[len(shares) // 4] if shares else 0.0)


def has_risen(now: LatencySample, baseline: Baseline) -> bool | None:
    """Whether calls wait too long or are refused too often now; None where too few calls tell."""
    if now.refused >= LEAST_REFUSALS and now.refused / now.tries > 2 * baseline.refusals + RISE_OF_REFUSALS:
        return True
    if now.calls < LEAST_CALLS or now.p90_ms is None:
        return None
    return baseline.p90_ms is not None and now.p90_ms > RISE * max(baseline.p90_ms, FLOOR_MS)


class Backpressure:
    """Lowers one worker's limits at targets where interactive calls wait, and stops their growth until they do not."""

    def __init__(self, limits: ConcurrencyLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._groups: dict[str, dict[str, float]] = defaultdict(dict)  # by target: monotonic seconds of the last use
        self._baselines: dict[str, Baseline] = {}
        self._learned = float("-inf")  # monotonic seconds
        self._slowed_at: dict[str, float] = {}  # by target: unix seconds of the last time
        self._slowed: set[str] = set()  # targets of which it is not known yet that it helped

    def note_use(self, group: str, target: str) -> None:
        """Note that a request of ``group`` was answered by ``target``."""
        self._groups[target][group] = self._clock.monotonic()

    async def check(self, connection: AsyncConnection) -> None:
        """Lower limits where interactive calls wait. A rise counts once: only calls begun since the last cut count."""
        now = self._clock.now()
        self._forget()
        if self._groups:
            if self._clock.monotonic() - self._learned >= LEARN_EVERY:
                self._baselines = await learn_baselines(connection, now)
                self._learned = self._clock.monotonic()
            seen = {
                one.target: one for one in await read_samples(connection, [(now - WINDOW, now + 1)], self._slowed_at)
            }
            for target in self._groups:
                self._judge(target, seen.get(target), now)
        self._limits.freeze({group for target in self._slowed for group in self._groups[target]})

    def _judge(self, target: str, sample: LatencySample | None, now: float) -> None:
        baseline = self._baselines.get(target, Baseline())
        risen = None if sample is None else has_risen(sample, baseline)
        if risen and sample is not None:
            self._slowed_at[target] = now
            self._slowed.add(target)
            for group in self._groups[target]:
                self._limits.of(group).slow_down()
            log.warning(
                "batch_backpressure",
                target=target,
                first_token_p90_ms=sample.p90_ms,
                baseline_p90_ms=baseline.p90_ms,
                calls=sample.tries,
                rate_limited=sample.refused,
                at_once={group: self._limits.of(group).current for group in self._groups[target]},
            )
        elif target in self._slowed and (risen is False or now - self._slowed_at[target] >= WINDOW):
            self._slowed.remove(target)
            log.info("batch_backpressure_over", target=target)

    def _forget(self) -> None:
        late = self._clock.monotonic() - FORGET
        for target, groups in list(self._groups.items()):
            self._groups[target] = {group: used for group, used in groups.items() if used > late}
            if not self._groups[target]:
                del self._groups[target]
                self._slowed_at.pop(target, None)
                self._slowed.discard(target)


async def learn_baselines(connection: AsyncConnection, now: float) -> dict[str, Baseline]:
    """Return what was usual at each target in the hour before the present."""
    spans = [
        (now - WINDOW - SAMPLE_SECONDS * (place + 1), now - WINDOW - SAMPLE_SECONDS * place) for place in range(SAMPLES)
    ]
    by_target = defaultdict(list)
    for sample in await read_samples(connection, spans, {}):
        by_target[sample.target].append(sample)
    return {target: baseline_of(samples) for target, samples in by_target.items()}


async def read_samples(
    connection: AsyncConnection, spans: Sequence[tuple[float, float]], since: dict[str, float]
) -> list[LatencySample]:
    """Read what interactive calls met in each span of unix seconds, by target; of one in ``since``, from then on."""
    query = {
        "days": [datetime.fromtimestamp(moment, UTC).date() for moment in {t for span in spans for t in span}],
        "starts": [least_id(start) for start, _ in spans],
        "ends": [least_id(end) for _, end in spans],
        "since": msgspec.json.encode({target: str(least_id(at)) for target, at in since.items()}).decode(),
        "most": MOST_CALLS,
        "streamed": STREAMED_MS,
    }
    return [LatencySample(**row) for row in (await connection.execute(READ, query)).mappings()]


# A timeout is a first token that took at least so long.
READ = text("""
    SELECT target, count(waited) AS calls, percentile_cont(0.9) WITHIN GROUP (ORDER BY waited) AS p90_ms,
           count(*) AS tries, count(*) FILTER (WHERE outcome = 'rate_limited') AS refused
    FROM unnest(CAST(:starts AS uuid[]), CAST(:ends AS uuid[])) AS span (first, last),
    LATERAL (
        SELECT request_id, attempts, total_ms - first_token_ms > :streamed AS is_streamed
        FROM usage_records
        WHERE day = ANY(CAST(:days AS date[])) AND request_id >= span.first AND request_id < span.last
          AND tier = 'interactive'
        ORDER BY day DESC, request_id DESC LIMIT :most
    ) AS call,
    LATERAL (
        SELECT target, outcome,
               CASE WHEN outcome = 'timeout' OR (outcome = 'ok' AND is_streamed) THEN ms END AS waited
        FROM jsonb_to_recordset(attempts) AS attempt (target text, outcome text, ms double precision, key text)
        WHERE key IS NULL  -- a team's own key has limits of its own
    ) AS try
    LEFT JOIN jsonb_each_text(CAST(:since AS jsonb)) AS last_time (target, id) USING (target)
    WHERE last_time.id IS NULL OR request_id >= CAST(last_time.id AS uuid)
    GROUP BY span.first, target
""")
