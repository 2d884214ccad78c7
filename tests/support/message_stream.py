# Reads a streamed message of Anthropic's dialect as strictly as its events are defined.

from __future__ import annotations

import json
from typing import Any


def built_of(stream: str) -> dict[str, Any]:
    """Return the message that the events of a stream build. Blocks come one after the other, deltas in the open one."""
    message: dict[str, Any] = {}
    open_block: int | None = None
    pieces = ""
    is_over = False
    for line in stream.split("\n"):
        if not line.startswith("data: "):
            continue
        assert not is_over
        event = json.loads(line[6:])
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block, pieces = event["index"], ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                delta, block = event["delta"], message["content"][open_block]
                if delta["type"] == "input_json_delta":
                    pieces += delta["partial_json"]
                elif delta["type"] == "citations_delta":
                    block.setdefault("citations", []).append(delta["citation"])
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                assert event["index"] == open_block
                if message["content"][open_block]["type"] in ("tool_use", "server_tool_use"):
                    message["content"][open_block]["input"] = json.loads(pieces or "{}")
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
                message |= {name: event[name] for name in event.keys() & {"context_management"}}
            case "message_stop":
                is_over = True
            case kind:
                assert kind == "ping", event
    assert is_over
    return message
