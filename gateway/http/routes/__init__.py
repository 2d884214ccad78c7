# Decode, call one use case, encode: one file per resource.

from litestar.handlers import HTTPRouteHandler

from gateway.http import console
from gateway.http.routes import (
    batch,
    calls,
    chat,
    count_tokens,
    files,
    health,
    live,
    mcp,
    message_batches,
    models,
    moderations,
    route,
    shadow,
    uploads,
    usage,
)
from gateway.http.routes.admin import (
    admin_keys,
    breakers,
    corrections,
    fleet_targets,
    instances,
    provider_keys,
    sign_in,
    teams,
    webhooks,
)
from gateway.http.routes.sockets import realtime
from gateway.http.routes.stored import conversations, responses

MODULES = (
    count_tokens,
    models,
    moderations,
    realtime,
    route,
    shadow,
    responses,
    conversations,
    batch,
    message_batches,
    files,
    usage,
    calls,
    live,
    mcp,
    teams,
    provider_keys,
    admin_keys,
    corrections,
    instances,
    fleet_targets,
    breakers,
    webhooks,
    health,
    sign_in,
    console,
)
HANDLERS = [
    *chat.handlers,
    *uploads.handlers,
    *(each for module in MODULES for each in vars(module).values() if isinstance(each, HTTPRouteHandler)),
]
