# What the router refuses, and why.
#
#   ServiceError
#   ├── NotFound
#   │   └── UnknownModel           404  model_not_found
#   ├── ModelNotAllowed            403  model_not_allowed
#   ├── Overloaded
#   │   └── NoReplica              503  overloaded
#   └── BadRequest
#       └── NoTargetFits           400
#           ├── LacksCapability            unsupported_parameter
#           ├── ContextTooShort         context_length_exceeded
#           └── CostLimitTooLow         max_cost_exceeded

from __future__ import annotations

from protocol.errors import BadRequest, NotFound, Overloaded, ServiceError


class UnknownModel(NotFound, code="model_not_found"):
    """The name is no model, alias or automatic route of the catalogue."""


class ModelNotAllowed(ServiceError, status=403, code="model_not_allowed"):
    """The team may not use a model of this name; whether there is one is not told to a team that may not use all."""


class NoReplica(Overloaded):
    """No replica is up now of any model that could serve the request: their pools are empty."""


class NoTargetFits(BadRequest, quotes=False):
    """No target of the route can serve this request, however healthy it is."""


class LacksCapability(NoTargetFits, code="unsupported_parameter"):
    """The request needs an capability, an endpoint kind or a tier that no target of the route has."""


class ContextTooShort(NoTargetFits, code="context_length_exceeded"):
    """The prompt is certainly longer than the context of every target of the route."""


class CostLimitTooLow(NoTargetFits, code="max_cost_exceeded"):
    """On every target of the route the request could cost more than the caller allows."""


class ArtifactMismatch(Exception):
    """The fitted weights are not the ones that the checksum beside them names; nothing is served from them."""
