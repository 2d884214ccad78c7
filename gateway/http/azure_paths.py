# Clients of Azure OpenAI (`AzureOpenAI` of openai-python and -node, Azure's own SDKs) ask at /openai/…, and name the
# model, as their deployment, in the path of an inference call. What they ask there is what others ask at /v1/….

from __future__ import annotations

from typing import Any

from gateway.dialects.table import ENDPOINTS

ROOT = "/openai/"
_DEPLOYMENTS = "deployments/"
_VERSION = b"api-version="


def at_v1(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the scope of a request below ``ROOT`` as the same request at /v1, without the version of Azure's API, with
    the deployment that its path names in ``scope["state"]["deployment"]``. A path that names none of an inference
    endpoint's stays as it is."""
    asked = scope["path"].removeprefix(ROOT)
    if not asked.startswith(_DEPLOYMENTS):
        return _moved(scope, "/v1/" + asked.removeprefix("v1/"))
    for endpoint in ENDPOINTS:
        deployment = asked.removeprefix(_DEPLOYMENTS).removesuffix(endpoint.path.removeprefix("/v1"))
        if deployment and asked == _DEPLOYMENTS + deployment + endpoint.path.removeprefix("/v1"):
            scope.setdefault("state", {})["deployment"] = deployment
            return _moved(scope, endpoint.path)
    return scope


def _moved(scope: dict[str, Any], path: str) -> dict[str, Any]:
    query = b"&".join(part for part in scope["query_string"].split(b"&") if not part.startswith(_VERSION))
    return {**scope, "path": path, "raw_path": path.encode(), "query_string": query}
