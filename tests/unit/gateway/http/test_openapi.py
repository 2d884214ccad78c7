# The API's description tells of every body and query that a handler reads.

from __future__ import annotations

import inspect
import json
import re

import pytest
from litestar import Litestar
from litestar.openapi.config import OpenAPIConfig

from gateway.http.openapi import SCHEMAS, describe
from gateway.http.routes import HANDLERS

TEXT = describe(Litestar(HANDLERS, logging_config=None, openapi_config=OpenAPIConfig(title="Tollgate", version="1")))
PATHS = json.loads(TEXT)["paths"]


def operation_of(path: str, method: str) -> dict:
    return PATHS[re.sub(r":\w+}", "}", path)][method.lower()]


def test_every_type_that_is_referred_to_is_there() -> None:
    """A reference that leads nowhere makes the document useless to programs."""
    document = json.loads(TEXT)
    said = set(re.findall(f'"{SCHEMAS}([^"]+)"', TEXT.decode()))

    assert "ChatRequest" in said
    assert said <= document["components"]["schemas"].keys()


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.handler_name)
def test_what_a_handler_reads_is_described(handler) -> None:
    """A handler that reads a body or a query has both in the document, and no other has."""
    if not handler.resolve_include_in_schema():
        return
    source = inspect.getsource(handler.fn)
    operation = operation_of(min(handler.paths), min(handler.http_methods - {"HEAD", "OPTIONS"}))
    reads_body = bool(re.search(r"request\.body\(\)|request\.stream\(\)|read_call\(|read_body\(", source))

    assert ("requestBody" in operation) == reads_body
    assert not reads_body or handler.opt.get("takes")


def test_money_may_be_a_number() -> None:
    """Limits in dollars are numbers in every client's code."""
    schemas = json.loads(TEXT)["components"]["schemas"]

    assert {"type": ["number", "string"]} in schemas["LimitsInput"]["properties"]["usd_per_day"]["anyOf"]


def test_a_call_has_its_headers_and_its_queries() -> None:
    """What the gateway takes beyond OpenAI's fields stands beside the body; a list has its pages."""
    chat = operation_of("/v1/chat/completions", "POST")
    usage = operation_of("/v1/usage", "GET")

    assert {"x-tier", "x-quality", "x-max-cost-usd", "idempotency-key"} <= {one["name"] for one in chat["parameters"]}
    assert {"team_id", "date", "group_by"} <= {one["name"] for one in usage["parameters"]}
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert operation_of("/admin/keys/{key_id:str}/rotate", "POST")["requestBody"]["required"] is False
    assert operation_of("/health/live", "GET")["security"] == []
    assert chat["security"] == [{"key": []}, {"x-api-key": []}, {"api-key": []}]
