# The conftest.py of vLLM's own tests where they run against a gateway: stands in for vLLM, which is not installed, and
# for their tests/utils.py, whose server is the one that runs already. Copied to where they run; imports none of ours.

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import anthropic
import openai
import pytest

URL, KEY = os.environ["TOLLGATE_URL"], os.environ["TOLLGATE_KEY"]


class AbsentType(type):
    """Whatever belongs to an absent class is absent, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __add__(cls, _: object) -> Any:
        return cls()


class Absent(metaclass=AbsentType):
    """An object of vLLM's own. A test that makes one judges vLLM's insides, and is skipped."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pytest.skip("judges vLLM's own objects")

    @staticmethod
    def is_rocm() -> bool:
        return False

    is_xpu = is_cpu = is_rocm

    @classmethod
    def snapshot_download(cls, *args: Any, **more: Any) -> str:
        return "no-adapter"


class AbsentModule(ModuleType):
    """A module of vLLM's: whatever is asked of it is absent."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "get_tokenizer":
            from transformers import PreTrainedTokenizerFast

            return lambda *_, **__: PreTrainedTokenizerFast.from_pretrained(os.environ["TOLLGATE_MODEL"])
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: Absent) if name == "hf_api" else Absent


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Client(openai.AsyncOpenAI):
    """Names a model where a request names none, which is enough for vLLM."""

    async def _prepare_options(self, options: Any) -> Any:
        options = await super()._prepare_options(options)
        if isinstance(options.json_data, dict) and not options.json_data.get("model") and options.method == "post":
            options.json_data["model"] = "Qwen/Qwen3-0.6B"
        return options


class RemoteOpenAIServer:
    """The gateway, whatever model and flags are asked for: it has every model of the suite."""

    DUMMY_API_KEY = KEY

    def __init__(self, model: str = "", args: Any = (), **_: Any) -> None:
        self.url_root = URL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *parts])

    def get_client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=URL + "/v1", api_key=KEY, **{"max_retries": 0, "timeout": 60, **more})

    def get_async_client(self, **more: Any) -> openai.AsyncOpenAI:
        return Client(base_url=URL + "/v1", api_key=KEY, **{"max_retries": 0, "timeout": 60, **more})

    def get_async_client_anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, **{"max_retries": 0, "timeout": 60, **more})


def stand_in(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


sys.meta_path.insert(0, Finder())
stand_in("pytest_asyncio", fixture=pytest.fixture)  # AnyIO's own plugin runs what is asynchronous
stand_in(
    "tests.utils", RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[], VLLM_PATH=Path(os.environ["VLLM_PATH"])
)


@pytest.fixture(scope="session")
def anyio_backend() -> Iterator[str]:
    yield "asyncio"
