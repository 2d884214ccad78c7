# The answer for a URL that no route has. Mostly its client has the wrong base URL, or speaks another API by default:
# the answer says what to set.

from __future__ import annotations

from gateway.dialects.table import ENDPOINTS

NEIGHBOURS = "is not spoken here. Set the client to chat completions: POST /v1/chat/completions."
NOT_STORED = "Responses are answered and not stored here. Send the items of the turns before in 'input'."
NOT_SPOKEN = {
    "/responses": NOT_STORED,
    "/conversations": NOT_STORED,
    "/assistants": f"The Assistants API {NEIGHBOURS}",
    "/threads": f"The Assistants API {NEIGHBOURS}",
    "/messages/batches": "Many messages at once go through POST /v1/batch, or /v1/files and /v1/batches.",
}
# What clients add to a base URL, some of them with the /v1.
KNOWN = (
    *(endpoint.path.removeprefix("/v1") for endpoint in ENDPOINTS),
    *("/moderations", "/models", "/files", "/batches", "/messages/count_tokens", "/batch", "/usage"),
)


def unknown_url(method: str, path: str) -> str:
    """Return the message for a path that no route serves, with where its client should go instead."""
    return f"Unknown request URL: {method} {path}. {_advice(path)}"


def _advice(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    asked = "".join(f"/{part}" for part in parts if part != "v1")
    if asked not in KNOWN:
        for beginning, words in NOT_SPOKEN.items():
            if f"{asked}/".startswith(f"{beginning}/"):
                return words
    for known in KNOWN:
        if asked == known:
            fault = "ends without its /v1" if "v1" not in parts else "has one /v1 too many"
            return f"Is /v1{known} meant? The client's base URL {fault}."
        if asked.endswith(known):
            return f"Is /v1{known} meant? Base URLs end in /v1, or before it where a client adds it, as Anthropic's do."
    return "GET /openapi.json lists what there is."
