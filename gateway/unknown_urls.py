# What is said of a URL that no route has. Mostly its client has the wrong base URL, or speaks another API by default:
# the answer says what to set.

from __future__ import annotations

# What clients add to their base URL, those of Anthropic with /v1 before it.
OPENAIS = ("/chat/completions", "/completions", "/embeddings", "/moderations", "/models", "/files", "/batches")
ANTHROPICS = ("/messages", "/messages/count_tokens")

NEIGHBOURS = "is not spoken here. Set the client to chat completions: POST /v1/chat/completions."
NOT_SPOKEN = {
    "/responses": f"The Responses API {NEIGHBOURS}",
    "/conversations": f"The Responses API {NEIGHBOURS}",
    "/assistants": f"The Assistants API {NEIGHBOURS}",
    "/threads": f"The Assistants API {NEIGHBOURS}",
    "/messages/batches": "Many messages at once go through POST /v1/batch, or /v1/files and /v1/batches.",
}


def unknown_url(method: str, path: str) -> str:
    """Return the words for a path that nobody serves, with where its client should go instead."""
    return f"Unknown request URL: {method} {path}. {_advice(path)}"


def _advice(path: str) -> str:
    asked = "".join(f"/{part}" for part in path.split("/") if part not in ("", "v1"))
    for beginning, words in NOT_SPOKEN.items():
        if f"{asked}/".startswith(f"{beginning}/"):
            return words
    if asked.endswith(ANTHROPICS):
        return "The base URL of Anthropic's clients is this house's without /v1: they ask for /v1/messages themselves."
    if asked.endswith(OPENAIS):
        return "The base URL of OpenAI's clients ends in /v1, once: they ask for /chat/completions and its like there."
    return "GET /openapi.json lists what there is."
