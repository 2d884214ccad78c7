# What a wire format has no words for and what changes the answer's meaning: no upstream is asked for it; another model
# of the route may be.

from __future__ import annotations

from gateway.upstreams.wire.errors import UpstreamUnable
from protocol.chat import ChatRequest

FORCED_BIAS = 100  # of a token that must not, or must alone, be said; less is a wish


class Unsayable(UpstreamUnable):
    """The format, or the model, has no way to say this; no upstream was asked."""

    outcome = "unsupported"


def refuse_openais_own(request: ChatRequest) -> None:
    """Raise Unsayable for what OpenAI's format alone can say: several replies, log probabilities, forced tokens."""
    asked = {
        "n": (request.n or 1) > 1,
        "logprobs": bool(request.logprobs),
        "logit_bias": any(abs(bias) >= FORCED_BIAS for bias in (request.logit_bias or {}).values()),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise Unsayable(f"The model that answers here does not know '{name}'. Leave it out.", param=name)
