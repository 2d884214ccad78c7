# What the router refuses, and why.
#
#   ServiceError
#   ├── NotFound
#   │   └── UnknownModel           404  model_not_found
#   ├── ModelNotAllowed            403  model_not_allowed
#   └── BadRequest
#       └── NoTargetFits           400
#           ├── LacksCapability            unsupported_parameter
#           ├── ContextTooShort         context_length_exceeded
#           └── CostLimitTooLow         max_cost_exceeded

from __future__ import annotations

from protocol.errors import BadRequest, NotFound, ServiceError


class UnknownModel(NotFound):
    """The name is no model, alias or automatic route of the catalogue."""

    code = "model_not_found"


class ModelNotAllowed(ServiceError):
    """The team may not use a model of this name; whether there is one is not told to a team that may not use all."""

    status = 403
    type = "invalid_request_error"
    code = "model_not_allowed"


class NoTargetFits(BadRequest):
    """No target of the route can serve this request, however healthy it is."""


class LacksCapability(NoTargetFits):
    """The request needs an capability, an endpoint kind or a tier that no target of the route has."""

    code = "unsupported_parameter"


class ContextTooShort(NoTargetFits):
    """The prompt is certainly longer than the context of every target of the route."""

    code = "context_length_exceeded"


class CostLimitTooLow(NoTargetFits):
    """On every target of the route the request could cost more than the caller allows."""

    code = "max_cost_exceeded"


class ArtifactMismatch(Exception):
    """The fitted weights are not the ones that the checksum beside them names; nothing is served from them."""
