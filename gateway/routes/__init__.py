# Decode, call one use case, encode: one file per resource.

from gateway.routes import chat, completions, embeddings, health, models

HANDLERS = [*chat.handlers, *completions.handlers, *embeddings.handlers, *models.handlers, *health.handlers]
