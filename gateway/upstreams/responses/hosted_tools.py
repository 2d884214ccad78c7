# Tools that the upstream runs for the model: which of them its provider may be asked for, and with what. What they may
# reach is the provider account's, or leaves by it, so that each but a search of the web is the operator's to allow.

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec.structs import replace

from gateway.core.settings import EVERY_TEAM
from gateway.upstreams.wire.base import Asking
from gateway.upstreams.wire.unsayable import Unsayable, refuse_unpriced
from protocol.responses import HOSTED, HOSTED_FIELDS, ResponsesTool
from router.eligibility import PRICE_OF


def tools_allowed(tools: tuple[ResponsesTool, ...], asking: Asking) -> Iterator[ResponsesTool]:
    """Yield tools as the upstream is told them. Raises Unsayable for one that the provider may not run, or whose price
    is not known."""
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if not tool.is_hosted:
            yield _callers(tool)
            continue
        unit = HOSTED[tool.type]
        if unit and getattr(asking.target.model.price, PRICE_OF[unit]) is None:
            words = f"What a call of '{tool.type}' costs at the model that answers here is not known."
            raise Unsayable(f"{words} Run such a tool yourself.", param=f"{where}.type")
        _check(tool, where, asking)
        yield replace(tool, model=asking.hosted.image_generation) if tool.type == "image_generation" else tool


def _callers(tool: ResponsesTool) -> ResponsesTool:
    """Return a tool that the caller runs without fields of others: no policy has read those."""
    inner = tool.tools and tuple(map(_callers, tool.tools))
    return replace(tool, tools=inner, **dict.fromkeys(HOSTED_FIELDS))


def _check(tool: ResponsesTool, where: str, asking: Asking) -> None:
    hosted = asking.hosted
    match tool.type:
        case "file_search" if hosted.file_search or asking.target.own is not None:
            named = (*hosted.file_search.get(asking.tenant, ()), *hosted.file_search.get(EVERY_TEAM, ()))
            other = next((one for one in tool.vector_store_ids or () if one not in named), None)
            if other is not None and asking.target.own is None:
                words = f"Your team may not search the vector store '{other[:64]}' at the provider that answers here."
                raise Unsayable(f"{words} Its operator may allow it.", param=f"{where}.vector_store_ids")
        case "image_generation" if hosted.image_generation is not None:
            _check_picture(tool, where, asking)
        case "mcp" if hosted.mcp:
            server = tool.connector_id or _host(tool.server_url or "")
            if server.lower() not in map(str.lower, hosted.mcp):
                words = f"The provider that answers here may not call the MCP server '{server[:100]}'."
                raise Unsayable(f"{words} Its operator may allow it.", param=f"{where}.server_url")
        case "code_interpreter" if hosted.code_interpreter:
            pass
        case "web_search" | "web_search_2025_08_26" if hosted.web_search:
            pass
        case kind:
            words = f"The provider that answers here may not run '{kind}' for your team."
            raise Unsayable(f"{words} Its operator may allow it, or run such a tool yourself.", param=f"{where}.type")


def _host(url: str) -> str:
    """Return the host of an https address, with its port where that is not the usual one."""
    parts = urlsplit(url)
    return parts.hostname or "" if parts.port in (None, 443) else f"{parts.hostname}:{parts.port}"


def _check_picture(tool: ResponsesTool, where: str, asking: Asking) -> None:
    if tool.model not in (None, asking.hosted.image_generation):
        words = f"Pictures are made by '{asking.hosted.image_generation}' at the provider that answers here."
        raise Unsayable(f"{words} Leave 'model' out.", param=f"{where}.model")
    refuse_unpriced(asking.target.model.price.pictures, tool.quality, tool.size, f"{where}.")
