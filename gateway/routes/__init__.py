# Decode, call one use case, encode: one file per resource.

from gateway import console
from gateway.routes import (
    admin,
    batch,
    breakers,
    chat,
    completions,
    corrections,
    embeddings,
    files,
    health,
    held_back,
    instances,
    messages,
    models,
    moderations,
    route,
    usage,
    webhooks,
)

MODULES = (
    chat,
    completions,
    embeddings,
    messages,
    models,
    moderations,
    route,
    held_back,
    batch,
    files,
    usage,
    admin,
    corrections,
    instances,
    breakers,
    webhooks,
    health,
    console,
)
HANDLERS = [handler for module in MODULES for handler in module.handlers]
