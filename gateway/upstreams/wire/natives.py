# A request that came in Anthropic's dialect, at a model of another maker: what is left out of it, and what cannot be.

from __future__ import annotations

from collections.abc import Iterator

from gateway.upstreams.wire.errors import UpstreamUnable
from protocol.messages import MessagesRequest


def leave_out_anthropics(asked: MessagesRequest) -> Iterator[str]:
    """Yield the names of the fields that no other API has. Raises UpstreamUnable for tools and blocks of Claude's own,
    which change the meaning."""
    yield from asked.anthropics_wishes()
    if (kind := asked.kind_of_its_own) is not None:
        is_tool = any(tool.type == kind for tool in asked.tools or ())
        what = f"does not know the tool '{kind}'" if is_tool else f"takes no block of type '{kind}'"
        right = "Describe it with an 'input_schema'" if is_tool else "Send its text, or pictures of its pages"
        words = f"The model that answers here {what}. {right}, or ask one of Anthropic's models."
        raise UpstreamUnable(words, param="tools" if is_tool else "messages")
