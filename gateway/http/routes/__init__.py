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
    message_batches,
    models,
    moderations,
    responses,
    route,
    series,
    shadow,
    usage,
)
from gateway.http.routes.admin import admin_keys, breakers, corrections, instances, teams, webhooks

MODULES = (
    *(count_tokens, models, moderations, route, shadow, responses, batch, message_batches, files, usage, calls),
    series,
    live,
    *(teams, admin_keys, corrections, instances, breakers, webhooks, health, console),
)
HANDLERS = [
    *chat.handlers,
    *(each for module in MODULES for each in vars(module).values() if isinstance(each, HTTPRouteHandler)),
]
