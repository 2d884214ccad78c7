# A streamed response, put together as a client does, and held to what the Responses API promises of its events.

from __future__ import annotations

import json
from typing import Any

PARTS = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}


def events_in(stream: str) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named as its data say, and they are numbered from 0 on."""
    events = []
    for block in stream.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def built_response(stream: str) -> dict[str, Any]:
    """Return the response that a whole stream ends with, once the pieces have added up to the same items."""
    events = events_in(stream)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}" and last["usage"]
    assert all(event["response"]["id"] == last["id"] for event in events[:2])
    assert all(event["response"]["output"] == [] for event in events[:2])
    items: list[dict[str, Any]] = []
    done: list[int] = []
    for event in events[2:-1]:
        _add(event, items, done)
    assert items == last["output"] and sorted(done) == list(range(len(items)))
    return last


def _add(event: dict[str, Any], items: list[dict[str, Any]], done: list[int]) -> None:
    kind, index = event["type"].removeprefix("response."), event["output_index"]
    if kind == "output_item.added":
        assert index == len(items) and event["item"]["status"] == "in_progress"
        items.append(event["item"])
        return
    item = items[index]
    assert index not in done and event.get("item_id", item["id"]) == item["id"]
    match kind.split("."):
        case ["output_item", "done"]:
            for name, value in item.items():
                assert event["item"][name] == value or name in ("status", "encrypted_content")
            items[index] = event["item"]
            done.append(index)
        case ["function_call_arguments", "delta"]:
            item["arguments"] += event["delta"]
        case ["function_call_arguments", "done"]:
            assert item["arguments"] == event["arguments"]
        case ["custom_tool_call_input", "delta"]:
            item["input"] += event["delta"]
        case ["custom_tool_call_input", "done"]:
            assert item["input"] == event["input"]
        case ["content_part", "added"]:
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        case ["content_part", "done"]:
            assert item["content"][event["content_index"]] == event["part"]
        case [_, step]:
            part = item["content"][event["content_index"]]
            field = PARTS[part["type"]]
            if step == "delta":
                part[field] += event["delta"]
                if "logprobs" in event:
                    part["logprobs"] += event["logprobs"]
            else:
                assert step == "done" and part[field] == event[field]
