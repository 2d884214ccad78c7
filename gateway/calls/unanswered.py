# The error when no target of a route answered: it names each model that was tried, by its name in the catalogue,
# and why it did not answer. The message is the gateway's own: it holds no URL, key or text of an upstream.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from billing.core.errors import RateLimited
from gateway.calls.call import Call
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.wire.errors import LONGEST_TOLD, UpstreamFailure, UpstreamRefused
from protocol.errors import Overloaded, ServiceError
from router.catalog.targets import Target

Tried = tuple[Target, UpstreamFailure | TargetAway]


class AllLimited(RateLimited, status=429, code="rate_limit_exceeded"):
    """Every key that a call could be sent with has met its upstream's limit: no upstream was asked."""


def told_of_all(call: Call, tried: Sequence[Tried], failure: UpstreamFailure) -> UpstreamFailure:
    """Return the last ``failure`` of a route, whose message now tells of all that were tried.

    A refusal keeps its message, which is about the request; so does a fault before any of these was tried.
    """
    if not isinstance(failure, UpstreamRefused) and any(why is failure for _, why in tried):
        failure.message = f"No model answered. {_why_each(call, tried)}"
    return failure


def none_may_be_asked(call: Call, tried: Sequence[Tried]) -> ServiceError:
    """Return the honest answer when no target may be asked: the rate limit of all of them, or 503."""
    aways = [why for _, why in tried if isinstance(why, TargetAway)]
    soonest = min((away.retry_in for away in aways), default=1.0)
    wait = max(1, math.ceil(min(soonest, LONGEST_TOLD)))
    words = f"No model can be asked now. {_why_each(call, tried)} Try again later."
    if aways and all(away.is_busy for away in aways):
        return AllLimited(words, headers={"retry-after": str(wait)})
    return Overloaded(words, retry_after=wait)


def failed_at(call: Call, target: Target) -> dict[str, str]:
    """Return the model and the endpoint of a failure, as its caller may know them."""
    return {"model": _name_for(call, target), "endpoint": f"{target.model.provider}/{target.endpoint.region}"}


def names_for(call: Call, targets: Iterable[Target]) -> str:
    """Return the names of the targets' models as a caller may know them: ``'small', 'large'``."""
    return ", ".join(dict.fromkeys(f"'{_name_for(call, target)}'" for target in targets))


def _why_each(call: Call, tried: Sequence[Tried]) -> str:
    """Return ``'small': its breaker is open, for 12 s more. 'large': the upstream answered 500.``; endpoints of a model
    that say the same are told once."""
    whys: dict[str, dict[str, None]] = {}
    for target, why in tried:
        whys.setdefault(_name_for(call, target), {})[_words(why)] = None
    return " ".join(f"'{name}': {', '.join(reasons)}." for name, reasons in whys.items())


def _words(why: UpstreamFailure | TargetAway) -> str:
    match why:
        case TargetAway(retry_in=wait) if wait < math.inf:
            return f"{why.reason}, for {max(1, math.ceil(wait))} s more"
        case TargetAway():
            return f"{why.reason}, until an administrator resets it"
    return why.message[:1].lower() + why.message[1:].rstrip(".")


def _name_for(call: Call, target: Target) -> str:
    """Return the model's name, or what the caller asked for where its team's list has not the model itself."""
    return target.model.name if call.routing.may_use(target.model.name) else call.request.model
