# Decode, call one use case, encode: one file per resource.

from gateway.routes import admin, chat, completions, embeddings, health, models, usage

MODULES = (chat, completions, embeddings, models, usage, admin, health)
HANDLERS = [handler for module in MODULES for handler in module.handlers]
