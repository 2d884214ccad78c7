# Requests for Bedrock's Converse: what Anthropic's Messages API would be asked, in Converse's words. Both have turns of
# blocks, tools by schema and thinking that is signed; what only Claude knows goes along as the model's own fields.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.upstreams.wire.unsayable import Unsayable

Block = dict[str, Any]

CACHE_POINT: Block = {"cachePoint": {"type": "default"}}
SAMPLING = {"max_tokens": "maxTokens", "temperature": "temperature", "top_p": "topP", "stop_sequences": "stopSequences"}
ELSEWHERE = frozenset(
    {"model", "stream", "messages", "system", "tools", "tool_choice", "metadata", "service_tier", "cache_control"}
)
CLAUDES = ("thinking", "output_config", "top_k", "anthropic_beta", "context_management")
NO_RESULT = "(nothing)"  # a tool's result is never empty here
DOCUMENTS = {"application/pdf": "pdf", "text/plain": "txt"}
NAME = re.compile(r"[^A-Za-z0-9 ()\[\]-]+")  # what a document's name may not have
LONGEST_NAME = 100  # characters


def converse_body(asked: Mapping[str, Any], model: str) -> tuple[Block, list[str]]:
    """Return the body of Converse for one of Anthropic's Messages API, and what it leaves out. Raises Unsayable.

    Models of other makers know neither Claude's fields nor, but for Amazon's own, marks for the cache.
    """
    is_claudes, dropped = _is_claudes(model), list[str]()
    has_cache = keeps_prompts(model)
    body: Block = {"messages": [_turn(turn, has_cache) for turn in asked["messages"]]}
    _tell_documents_apart(body["messages"])
    last = body["messages"][-1]["content"]
    if has_cache and asked.get("cache_control") and last[-1] != CACHE_POINT:  # of the last block, wherever that is
        last.append(CACHE_POINT)
    if system := asked.get("system"):
        body["system"] = list(_blocks(system, has_cache))
    inference = {theirs: asked[ours] for ours, theirs in SAMPLING.items() if asked.get(ours) is not None}
    if inference:
        body["inferenceConfig"] = inference
    more = {name: asked[name] for name in asked if name not in ELSEWHERE and name not in SAMPLING}
    if not is_claudes:
        dropped += [name for name in CLAUDES if more.pop(name, None) is not None]
    if tools := asked.get("tools"):
        config: Block = {"tools": [one for tool in tools for one in _tool(tool, has_cache)]}
        body["toolConfig"] = config | _choice(asked, more, is_claudes)
    if more:
        body["additionalModelRequestFields"] = more
    return body, dropped + [name for name in ("metadata",) if asked.get(name)]


def keeps_prompts(model: str) -> bool:
    """Whether a model has a cache of prompts, which marks are for."""
    return _is_claudes(model) or "nova" in model


def _is_claudes(model: str) -> bool:
    return model.startswith("arn:") or "claude" in model


def _turn(turn: Mapping[str, Any], has_cache: bool) -> Block:
    return {"role": turn["role"], "content": list(_blocks(turn["content"], has_cache))}


def _blocks(content: Any, has_cache: bool) -> Iterator[Block]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for block in content:
        yield _block(block)
        if has_cache and block.get("cache_control"):
            yield CACHE_POINT


def _block(block: Mapping[str, Any]) -> Block:
    match block["type"]:
        case "text":
            return {"text": block["text"]}
        case "image":
            source = _inside(block["source"], "messages.content.image")
            return {"image": {"format": source["media_type"].rpartition("/")[2], "source": {"bytes": source["data"]}}}
        case "document":
            return {"document": _document(block)}
        case "tool_use":
            return {"toolUse": {"toolUseId": block["id"], "name": block["name"], "input": block["input"]}}
        case "tool_result":
            return {"toolResult": _result(block)}
        case "thinking":
            told = {"text": block["thinking"], "signature": block["signature"]}
            return {"reasoningContent": {"reasoningText": told}}
        case "redacted_thinking":
            return {"reasoningContent": {"redactedContent": block["data"]}}
    raise Unsayable(f"Bedrock's Converse knows no blocks of type {block['type']!r}.", param="messages")


def _document(block: Mapping[str, Any]) -> Block:
    if (block.get("citations") or {}).get("enabled"):
        words = "The model that answers here cites no documents. Send it without 'citations', or ask Anthropic's API."
        raise Unsayable(words, param="messages")
    source = block["source"]
    if source["type"] == "text":
        told: Block = {"format": "txt", "source": {"text": source["data"]}}
    else:
        inside = _inside(source, "messages.content.document")
        told = {"format": DOCUMENTS.get(inside["media_type"], "pdf"), "source": {"bytes": inside["data"]}}
    title = " ".join(NAME.sub(" ", block.get("title") or "").split())[:LONGEST_NAME]
    more = {"context": block["context"]} if block.get("context") else {}
    return told | {"name": title or "document"} | more


def _tell_documents_apart(turns: list[Block]) -> None:
    """Number documents whose name another one has: Converse refuses two of one name."""
    blocks = (block for turn in turns for block in turn["content"])
    shown = (one for block in blocks for one in (block, *block.get("toolResult", {}).get("content", ())))
    seen = Counter[str]()
    for document in (one["document"] for one in shown if "document" in one):
        seen[name := document["name"]] += 1
        if seen[name] > 1:
            document["name"] = f"{name} ({seen[name]})"


def _inside(source: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return a source that is in the request itself: Bedrock fetches nothing."""
    if source["type"] != "base64":
        raise Unsayable("Bedrock fetches no images or documents. Send the data itself, in base64.", param=what)
    return source


def _result(block: Mapping[str, Any]) -> Block:
    content = list(_blocks(block.get("content") or (), has_cache=False))
    told: Block = {"toolUseId": block["tool_use_id"], "content": content or [{"text": NO_RESULT}]}
    return told | ({"status": "error"} if block.get("is_error") else {})


def _tool(tool: Mapping[str, Any], has_cache: bool) -> Iterator[Block]:
    if tool.get("type") not in (None, "custom"):
        raise Unsayable(f"Bedrock's Converse knows no tools of type {tool['type']!r}.", param="tools")
    told: Block = {"name": tool["name"], "inputSchema": {"json": tool["input_schema"]}}
    if tool.get("description"):
        told["description"] = tool["description"]
    if tool.get("strict"):
        told["strict"] = True
    yield {"toolSpec": told}
    if has_cache and tool.get("cache_control"):
        yield CACHE_POINT


def _choice(asked: Mapping[str, Any], more: Block, is_claudes: bool) -> Block:
    """Return which tool is to be called; what Converse has no word for is said in Claude's own."""
    choice = asked.get("tool_choice")
    if choice is None:
        return {}
    if choice["type"] == "none" or choice.get("disable_parallel_tool_use"):
        if not is_claudes:
            raise Unsayable("The model that answers here cannot be kept from calling tools, or several.", param="tools")
        more["tool_choice"] = choice
        return {}
    kinds = {"auto": {"auto": {}}, "any": {"any": {}}, "tool": {"tool": {"name": choice.get("name")}}}
    return {"toolChoice": kinds[choice["type"]]}
