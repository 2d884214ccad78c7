# The conftest.py of openai-python's and anthropic-sdk-python's own tests of API resources where they run against a
# gateway. They are made for a mock that takes any id and any value: what no API has is replaced by what this one has.
# Copied to where they run; imports none of ours.

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import anthropic
import httpx
import openai
import pytest

URL, KEY, SDK = os.environ["TOLLGATE_URL"], os.environ["TOLLGATE_KEY"], os.environ["TOLLGATE_SDK"]
CHAT, CLAUDE = "gpt-6-astra", "claude-opus-5-5"
# Of a value in a body that means nothing to a real API, and what is sent instead; None leaves the field out.
VALUES: dict[str, Callable[[Any], Any]] = {
    "max_completion_tokens": lambda value: value or None,
    "max_tokens": lambda value: value or None,
    "logit_bias": lambda _: None,
    "limit": lambda value: value or 1,
}


def made(path: str, body: Any = None, **more: Any) -> Any:
    answer = httpx.post(URL + path, headers={"authorization": f"Bearer {KEY}"}, json=body, timeout=30, **more)
    answer.raise_for_status()
    return answer.json()["id"]


def response() -> str:
    return str(made("/v1/responses", {"model": CHAT, "input": "hi"}))


def conversation() -> str:
    item = {"type": "message", "role": "user", "content": "hi"}
    return str(made("/v1/conversations", {"items": [item]}))


def item() -> str:
    headers = {"authorization": f"Bearer {KEY}"}
    return str(httpx.get(f"{URL}/v1/conversations/{real('conv_123')}/items", headers=headers).json()["data"][0]["id"])


def file() -> str:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": CHAT, "messages": [{"role": "user", "content": "hi"}]}
    sent = {"file": ("a.jsonl", json.dumps(line).encode())}
    return str(made("/v1/files", None, files=sent, data={"purpose": "batch"}))


def batch() -> str:
    body = {"input_file_id": file(), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(made("/v1/batches", body))


def message_batch() -> str:
    params = {"model": CLAUDE, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return str(made("/v1/messages/batches", {"requests": [{"custom_id": "1", "params": params}]}))


MAKES: dict[str, Callable[[], str]] = {
    "resp_677efb5139a88190b512bc3fef8e535d": response,
    "response_id": response,
    "resp_123": response,
    "conv_123": conversation,
    "msg_abc": item,
    "file_id": file,
    "input_file_id": file,
    "batch_id": batch,
    "message_batch_id": message_batch,
    "model_id": lambda: CLAUDE,
}
NAMES = re.compile(r"\b(" + "|".join(MAKES) + r")\b")


@cache
def real(name: str) -> str:
    """Return the id of what stands for ``name``, made when it is first asked for in a test."""
    return MAKES[name]()


def changed(value: Any) -> Any:
    """Return a body as this API can answer it."""
    match value:
        case str():
            return real(value) if value in MAKES else value
        case dict():
            said = {key: VALUES[key](one) if key in VALUES else changed(one) for key, one in value.items()}
            return {key: one for key, one in said.items() if one is not None or value[key] is None}
        case list():
            return [changed(one) for one in value]
    return value


class NamesWhatExists:
    """A client whose paths and bodies name what exists."""

    def _prepare_options(self, options: Any) -> Any:
        options.url = NAMES.sub(lambda found: real(found[0]), options.url)
        options.json_data, options.params = changed(options.json_data), changed(options.params)
        if options.url in ("/responses", "/responses/compact"):  # a stored prompt may have both, where there are some
            options.json_data = {"model": CHAT, "input": "hi", **(options.json_data or {})}
        return super()._prepare_options(options)  # type: ignore[misc]


class OurOpenAI(NamesWhatExists, openai.OpenAI): ...


class OurAnthropic(NamesWhatExists, anthropic.Anthropic): ...


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    checks = {"_strict_response_validation": getattr(request, "param", True), "max_retries": 0, "api_key": KEY}
    kind, root = (OurOpenAI, URL + "/v1") if SDK == "openai" else (OurAnthropic, URL)
    with kind(base_url=root, **checks) as client:
        yield client


@pytest.fixture(autouse=True)
def _afresh() -> None:
    real.cache_clear()


@pytest.fixture
def async_client() -> None:
    pytest.skip("as the other client")


@pytest.fixture
def respx2_mock() -> None:
    pytest.skip("asks a mock of its own")


respx_mock = respx2_mock
for name in ("respx", "tests.respx2"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].MockRouter = object  # type: ignore[attr-defined]
