# Fields of other gateways' clients that cannot be honoured here, and whose silence would be another answer than was
# asked for: refused by name, with what to do instead.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.errors import UnsupportedParameter

# What cannot be honoured, and what to do in its place. A provider whose `allow_fields` names it gets it all the same.
REFUSED: Mapping[str, str] = {
    "mock_response": "Answers come from models; ask 'tollgate-demo' of `tollgate dev` for one that costs nothing",
    "mock_tool_calls": "Answers come from models",
    "api_key": "Providers' keys are the operator's, in tollgate.yaml",
    "api_base": "Providers' addresses are the operator's, in tollgate.yaml",
    "base_url": "Providers' addresses are the operator's, in tollgate.yaml",
    "custom_llm_provider": "Name one of GET /v1/models, or 'provider': {\"only\": […]}",
    "guardrails": "The content policy is the operator's and the team's, for every call alike",
    "plugins": "Leave it out: nothing is added to a prompt here",
    "drop_params": "Leave it out: what changes no meaning is left out and told in x-tollgate-dropped, all else refused",
    "transforms": "A prompt goes as it is; name a model with a longer context in 'models' for one that is too long",
    "provider.require_parameters": "What a provider lacks and changes no meaning is told in x-tollgate-dropped",
    "provider.data_collection": "Name the providers that may be asked in 'provider.only'",
    "provider.zdr": "Name the providers that may be asked in 'provider.only'",
    "provider.max_price": "Send x-max-cost-usd",
    "provider.quantizations": "Name the models that may be asked",
}


def refuse_not_honoured(extra: Mapping[str, Any], understood: frozenset[str], allowed: frozenset[str]) -> None:
    """Refuse fields that cannot be honoured, unless a provider of the route is ``allowed`` to be sent them. Raises
    UnsupportedParameter."""
    for name in REFUSED.keys() & extra.keys():
        if name not in understood and name.partition(".")[0] not in allowed:
            raise UnsupportedParameter(f"'{name}' is not supported by this gateway. {REFUSED[name]}.", param=name)
