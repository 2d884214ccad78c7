# The conftest.py of SGLang's own tests where they run against a gateway: stands in for SGLang, which is not installed,
# and for its test utilities, whose server is the one that runs already. What the tests share (sglang.test.kits) is read
# from its source. Copied to where they run; imports none of ours.

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import anthropic
import openai
import pytest
import requests

URL, KEY = os.environ["TOLLGATE_URL"], os.environ["TOLLGATE_KEY"]
KITS = Path(os.environ["SGLANG_PATH"]) / "python" / "sglang" / "test" / "kits"
MODELS = {
    "DEFAULT_MODEL_NAME_FOR_TEST": "meta-llama/Llama-3.1-8B-Instruct",
    "DEFAULT_SMALL_MODEL_NAME_FOR_TEST": "meta-llama/Llama-3.2-1B-Instruct",
}


class Absent:
    """An object of SGLang's own. A test that makes one judges SGLang's insides, and is skipped."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pytest.skip("judges SGLang's own objects")

    def __init_subclass__(cls, **more: Any) -> None:
        pass

    def __class_getitem__(cls, key: Any) -> Any:
        pytest.skip("asks with SGLang's own data")


class StandIn(ModuleType):
    """A module of SGLang's: what the tests ask of it stands here, whatever else is absent."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in GIVEN:
            return GIVEN[name]
        if name.startswith("DEFAULT_") and name.endswith("_FOR_TEST"):
            return MODELS.get(name, "no-model")
        if name.startswith("is_"):
            return lambda *_, **__: False
        if name.startswith(("register_", "kill_")):
            return lambda *_, **__: None
        return Absent


def get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.environ["TOLLGATE_MODEL"])


GIVEN: dict[str, Any] = {
    "DEFAULT_URL_FOR_TEST": URL,
    "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 60,
    "CustomTestCase": unittest.TestCase,
    "STDERR_FILENAME": os.devnull,
    "STDOUT_FILENAME": os.devnull,
    "get_tokenizer": get_tokenizer,
    "popen_launch_server": lambda *_, **__: SimpleNamespace(pid=0),
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of SGLang."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != "sglang":
            return None
        if name.startswith("sglang.test.kits."):
            return importlib.util.spec_from_file_location(name, KITS / f"{name.rpartition('.')[2]}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Client(openai.OpenAI):
    """Calls with the team's key, whichever a test names."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"max_retries": 0, "timeout": 60, **more, "api_key": KEY})


class AsyncClient(openai.AsyncOpenAI):
    """Likewise."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"max_retries": 0, "timeout": 60, **more, "api_key": KEY})


class Claude(anthropic.Anthropic):
    """Likewise."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"max_retries": 0, "timeout": 60, **more, "api_key": None, "auth_token": KEY})


class Session(requests.Session):
    """Likewise."""

    def request(self, method: Any, url: Any, *args: Any, **more: Any) -> Any:
        more["headers"] = {**(more.get("headers") or {}), "Authorization": f"Bearer {KEY}"}
        return super().request(method, url, *args, **{"timeout": 60, **more})


sys.meta_path.insert(0, Finder())
openai.Client = openai.OpenAI = Client  # type: ignore[misc]
openai.AsyncClient = openai.AsyncOpenAI = AsyncClient  # type: ignore[misc]
anthropic.Anthropic = Claude  # type: ignore[misc]
requests.sessions.Session = requests.Session = Session  # type: ignore[misc]
