# What to do about each error that a call may end with, by its code: the words of docs/call-it.md's table, which a test
# compares with these. Calls that were refused are shown with them.

from __future__ import annotations

from collections.abc import Mapping

_OF_CODES = {
    "model_not_allowed": "your team, or your key, may not use it; the message names what it may",
    "endpoint_not_allowed": "your key is for other endpoints, which the text names: ask who made it",
    "address_not_allowed": "your key is for calls from other addresses: ask who made it",
    "provider_key_missing": "your team goes to that provider with keys of its own alone: its admin brings one",
    "team_suspended": "ask your operator",
    "permission_denied": "your key may not do this: ask your operator",
    "unknown_url not_found": "there is no such path, or nothing of that name: the message says what there is",
    "model_not_found": "`GET /v1/models` lists the names",
    "invalid_json invalid_type invalid_value missing_required_parameter": (
        "correct what the message and `error.param` name"
    ),
    "max_cost_exceeded": (
        "no model that fits costs as little as `x-max-cost-usd` says at the most: raise it, or lower `max_tokens`"
    ),
    "context_length_exceeded": "shorten the prompt, or ask a model with a longer context",
    "unsupported_parameter": "the model that answers here has no such field: leave it out, or ask another model",
    "content_policy_violation": "the content policy found something",
    "duplicate_key unknown_parameter": (
        "a key stands twice in one object, or the query has a parameter that is not known here: the message names it"
    ),
    "invalid_content_type invalid_form": "a file comes as `multipart/form-data`, with the parts that the message names",
    "invalid_image_url": "send a public `https` URL, or the picture itself as a `data:` URL",
    "invalid_tool_arguments": (
        "a tool call among the messages has arguments that are no JSON object: send back what the model gave"
    ),
    "previous_response_not_found": (
        "it was not stored, is past its time, or was deleted: leave `previous_response_id` out and send the "
        "conversation whole"
    ),
    "conflict idempotency_key_reused idempotency_key_in_use idempotency_answer_not_kept": (
        "the message says what is in the way: another request needs another `Idempotency-Key`, one that runs is waited "
        "for"
    ),
    "request_too_large": "the body is longer than the message says one may be",
    "unsupported_encoding": "the body comes compressed: send it as it is",
    "rate_limit_exceeded": (
        "wait `retry-after` seconds; OpenAI's and Anthropic's clients do by themselves. Without `retry-after` the "
        "request alone is more than its limit: lower `max_tokens` as the message says, or shorten the prompt"
    ),
    "insufficient_quota": (
        "a budget is spent: it will not help to try again before it renews, and `x-should-retry: false` says so"
    ),
    "idempotency_answer_unreadable stored_response_unreadable contents_unreadable": (
        "what was kept cannot be read any more: send the request anew, and tell your operator"
    ),
    "server_error": (
        "what you sent could not be read or stored here: send it again, a file in parts, and tell your operator if it "
        "goes on"
    ),
    "upstream_error": "the provider failed, and so did what stood in for it: try again",
    "overloaded": (
        "every target is busy or starts, or the database does not answer where the call needs it (a key not seen "
        "before, a budget without drawn room, an `Idempotency-Key`): wait `retry-after` seconds"
    ),
    "session_expired websocket_connection_limit_reached": "the WebSocket was open for an hour: open another",
    "websocket_stream_limit_reached invalid_stream_id": (
        "streams of one WebSocket have at most 32 names, each of 1 to 256 letters, digits, `_`, `-` and `.`"
    ),
    "too_many_responses duplicate_event": (
        "of one conversation by voice: wait until a response has ended; give each event another `event_id`"
    ),
    "tool_not_allowed": "your key may not call that tool of the MCP server: the message names those that it may",
    "method_not_found session_not_found": (
        "the MCP server carries tools alone; its session is another key's or has ended: `initialize` begins another"
    ),
    "service_unavailable content_check_failed": (
        "the gateway closes, or a part that this call needs does not answer: try again"
    ),
    "upstream_timeout": "the provider took too long: try again, with a shorter answer perhaps",
}
ADVICE: Mapping[str, str] = {code: words for codes, words in _OF_CODES.items() for code in codes.split()}
