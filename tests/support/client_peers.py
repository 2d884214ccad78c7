"""One client of the field at a gateway: a word, the same as a stream, and a task with a tool.

Run by ``tests/peers/test_clients.py`` with the client's own Python: ``python client_peers.py CLIENT URL KEY`` prints
what the client heard and how wide the tool was told to open as JSON. Each function is set up as docs/clients.md says
and yields the texts that its client gives. Those with a ``model`` are called by
``tests/acceptance/test_small_clients.py``, and yield an answer in a schema and a refusal besides.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GPT, CLAUDE = "gpt-4o", "claude-sonnet-4-5"
HI = "Say something."
USE = 'Use open_gate {"width": 3}'
WIDTHS: list[int] = []  # the tool's calls

SCHEMA = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}
TOOL = {"type": "function", "function": {"name": "open_gate", "description": "Opens the gate.", "parameters": SCHEMA}}


def open_gate(width: int) -> str:
    """Open the gate.

    Args:
        width: How wide, in metres.
    """
    WIDTHS.append(width)
    return "It is open."


async def open_gate_slowly(width: int) -> str:
    """Open the gate."""
    return open_gate(width)


def command(name: str, *arguments: str) -> str:
    """Return what a command prints that stands beside this Python."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def openai(url: str, key: str) -> Iterator[str]:
    from openai import OpenAI

    yield from _chats(OpenAI(base_url=f"{url}/v1", api_key=key).chat.completions.create)


def _chats(create: Callable[..., Any], model: str = GPT) -> Iterator[str]:
    """Talk through what takes the arguments of OpenAI's package and answers with its objects."""
    hi = [{"role": "user", "content": HI}]
    yield create(model=model, messages=hi).choices[0].message.content
    chunks = create(model=model, messages=hi, stream=True)
    yield "".join(getattr(chunk.choices[0].delta, "content", None) or "" for chunk in chunks if chunk.choices)
    messages: list[Any] = [{"role": "user", "content": USE}]
    (call,) = create(model=model, messages=messages, tools=[TOOL]).choices[0].message.tool_calls
    said = {"name": call.function.name, "arguments": call.function.arguments}
    messages.append({"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": said}]})
    messages.append({"role": "tool", "tool_call_id": call.id, "content": open_gate(**json.loads(said["arguments"]))})
    yield create(model=model, messages=messages, tools=[TOOL]).choices[0].message.content


def _corners(create: Callable[..., Any], model: str) -> Iterator[str]:
    """Ask for an answer in a schema, and for a model that is not there."""
    hi = [{"role": "user", "content": HI}]
    form = {"type": "json_schema", "json_schema": {"name": "gate", "schema": SCHEMA}}
    yield create(model=model, messages=hi, response_format=form).choices[0].message.content
    try:
        create(model="no-such-model", messages=hi)
    except Exception as exc:
        yield str(exc)


def openai_over_aiohttp(url: str, key: str, model: str = GPT) -> Iterator[str]:
    from openai import AsyncOpenAI, DefaultAioHttpClient

    async def ask(**asked: Any) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=DefaultAioHttpClient()) as client:
            answer: Any = await client.chat.completions.create(**asked)
            return [chunk async for chunk in answer] if asked.get("stream") else answer

    def create(**asked: Any) -> Any:
        return asyncio.run(ask(**asked))

    yield from _chats(create, model)
    yield from _corners(create, model)


def huggingface_hub(url: str, key: str, model: str = GPT) -> Iterator[str]:
    from huggingface_hub import InferenceClient

    create = InferenceClient(base_url=f"{url}/v1", api_key=key).chat.completions.create
    yield from _chats(create, model)
    yield from _corners(create, model)


def aisuite(url: str, key: str, model: str = GPT) -> Iterator[str]:
    import aisuite

    client = aisuite.Client({"openai": {"api_key": key, "base_url": f"{url}/v1"}})

    def create(model: str, **asked: Any) -> Any:
        return client.chat.completions.create(model=f"openai:{model}", **asked)

    yield create(model, messages=[{"role": "user", "content": HI}]).choices[0].message.content
    chunks = create(model, messages=[{"role": "user", "content": HI}], stream=True)
    yield "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    messages = [{"role": "user", "content": USE}]
    yield create(model, messages=messages, tools=[open_gate], max_turns=2).choices[0].message.content
    yield from _corners(create, model)


def curl(url: str, key: str, model: str = GPT) -> Iterator[str]:
    def create(**asked: Any) -> Any:
        line = ["curl", "-sS", "--fail-with-body", f"{url}/v1/chat/completions", "-H", f"authorization: Bearer {key}"]
        line += ["-H", "content-type: application/json", "-d", json.dumps(asked)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout)
        data = [line[6:] for line in done.stdout.split("\n") if line.startswith("data: {")] or [done.stdout]
        answers = [json.loads(each, object_hook=lambda said: SimpleNamespace(**said)) for each in data]
        return answers if asked.get("stream") else answers[0]

    yield from _chats(create, model)
    yield from _corners(create, model)


def openai_responses(url: str, key: str) -> Iterator[str]:
    from openai import OpenAI

    responses = OpenAI(base_url=f"{url}/v1", api_key=key).responses
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}  # type: ignore[dict-item]
    yield responses.create(model=GPT, input=HI).output_text
    with responses.stream(model=GPT, input=HI) as stream:
        yield stream.get_final_response().output_text
    asked = responses.create(model=GPT, input=USE, tools=[tool])
    (call,) = asked.output
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": open_gate(**json.loads(call.arguments)),
    }
    yield responses.create(model=GPT, input=[output], previous_response_id=asked.id, tools=[tool]).output_text


def anthropic(url: str, key: str) -> Iterator[str]:
    from anthropic import Anthropic, beta_tool

    client = Anthropic(base_url=url, api_key=key)
    asked: Any = {"model": CLAUDE, "max_tokens": 99}
    hi: Any = [{"role": "user", "content": HI}]
    yield client.messages.create(messages=hi, **asked).content[0].text
    with client.messages.stream(messages=hi, **asked) as stream:
        yield "".join(stream.text_stream)
    runner = client.beta.messages.tool_runner(
        messages=[{"role": "user", "content": USE}], tools=[beta_tool(open_gate)], **asked
    )
    yield runner.until_done().content[0].text


def instructor(url: str, key: str) -> Iterator[str]:
    import instructor
    from anthropic import Anthropic
    from openai import OpenAI
    from pydantic import BaseModel

    class Gate(BaseModel):
        width: int

    messages: Any = [{"role": "user", "content": HI}]
    ours = OpenAI(base_url=f"{url}/v1", api_key=key)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(ours, mode=mode)
        yield client.chat.completions.create(model=GPT, messages=messages, response_model=Gate).model_dump_json()
    partial = instructor.from_openai(ours).chat.completions.create_partial(
        model=GPT, messages=messages, response_model=Gate
    )
    yield list(partial)[-1].model_dump_json()
    client = instructor.from_anthropic(Anthropic(base_url=url, api_key=key))
    yield client.messages.create(model=CLAUDE, max_tokens=99, messages=messages, response_model=Gate).model_dump_json()


def _langchain(model: Any) -> Iterator[str]:
    from langchain_core.tools import tool
    from langgraph.prebuilt import create_react_agent

    yield model.invoke(HI).text
    yield "".join(chunk.text for chunk in model.stream(HI))
    agent = create_react_agent(model, [tool(open_gate)])
    yield agent.invoke({"messages": [("user", USE)]})["messages"][-1].text


def langchain_openai(url: str, key: str) -> Iterator[str]:
    from langchain_openai import ChatOpenAI

    yield from _langchain(ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=GPT))


def langchain_responses(url: str, key: str) -> Iterator[str]:
    from langchain_openai import ChatOpenAI

    yield from _langchain(ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=GPT, use_responses_api=True))


def langchain_anthropic(url: str, key: str) -> Iterator[str]:
    from langchain_anthropic import ChatAnthropic

    yield from _langchain(ChatAnthropic(base_url=url, api_key=key, model=CLAUDE))


def _llama_index(model: Any) -> Iterator[str]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.tools import FunctionTool

    yield model.complete(HI).text
    yield list(model.stream_complete(HI))[-1].text

    async def agent() -> str:
        tools = [FunctionTool.from_defaults(fn=open_gate)]
        return str(await FunctionAgent(tools=tools, llm=model, streaming=True).run(USE))

    yield asyncio.run(agent())


def llama_index_openai_like(url: str, key: str) -> Iterator[str]:
    from llama_index.llms.openai_like import OpenAILike

    facts: Any = {"is_chat_model": True, "is_function_calling_model": True}
    yield from _llama_index(OpenAILike(model=GPT, api_base=f"{url}/v1", api_key=key, **facts))


def haystack(url: str, key: str) -> Iterator[str]:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    facts: Any = {"api_key": Secret.from_token(key), "api_base_url": f"{url}/v1", "model": GPT}
    pieces: list[str] = []
    yield OpenAIChatGenerator(**facts).run([ChatMessage.from_user(HI)])["replies"][0].text
    OpenAIChatGenerator(**facts, streaming_callback=lambda chunk: pieces.append(chunk.content)).run(
        [ChatMessage.from_user(HI)]
    )
    yield "".join(pieces)
    agent = Agent(chat_generator=OpenAIChatGenerator(**facts), tools=[create_tool_from_function(open_gate)])
    yield agent.run([ChatMessage.from_user(USE)])["messages"][-1].text


def _pydantic_ai(model: Any) -> Iterator[str]:
    from pydantic_ai import Agent

    async def streamed() -> str:
        async with Agent(model).run_stream(HI) as run:
            return str(await run.get_output())

    yield Agent(model).run_sync(HI).output
    yield asyncio.run(streamed())
    yield Agent(model, tools=[open_gate]).run_sync(USE).output


def pydantic_ai_chat(url: str, key: str) -> Iterator[str]:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    yield from _pydantic_ai(OpenAIChatModel(GPT, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)))


def pydantic_ai_responses(url: str, key: str) -> Iterator[str]:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    yield from _pydantic_ai(OpenAIResponsesModel(GPT, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)))


def pydantic_ai_anthropic(url: str, key: str) -> Iterator[str]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    yield from _pydantic_ai(AnthropicModel(CLAUDE, provider=AnthropicProvider(base_url=url, api_key=key)))


def _agents(kind: str, url: str, key: str) -> Iterator[str]:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def asked() -> AsyncIterator[str]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        model = getattr(agents, kind)(model=GPT, openai_client=client)
        plain = agents.Agent(name="keeper", model=model)
        yield (await agents.Runner.run(plain, HI)).final_output
        run = agents.Runner.run_streamed(plain, HI)
        async for _ in run.stream_events():
            pass
        yield run.final_output
        armed = agents.Agent(name="keeper", model=model, tools=[agents.function_tool(open_gate)])
        yield (await agents.Runner.run(armed, USE)).final_output

    yield from _run(asked)


def openai_agents_responses(url: str, key: str) -> Iterator[str]:
    yield from _agents("OpenAIResponsesModel", url, key)


def openai_agents_chat(url: str, key: str) -> Iterator[str]:
    yield from _agents("OpenAIChatCompletionsModel", url, key)


def _run(asked: Callable[[], AsyncIterator[str]]) -> Iterator[str]:
    """Yield what a coroutine yields, all at its end."""

    async def gather() -> list[str]:
        return [text async for text in asked()]

    yield from asyncio.run(gather())


def _litellm(model: str, base: str, key: str) -> Iterator[str]:
    import litellm

    yield from _chats(partial(litellm.completion, api_base=base, api_key=key), model)


def litellm_openai(url: str, key: str) -> Iterator[str]:
    yield from _litellm(f"openai/{GPT}", f"{url}/v1", key)


def litellm_anthropic(url: str, key: str) -> Iterator[str]:
    yield from _litellm(f"anthropic/{CLAUDE}", url, key)


def smolagents(url: str, key: str) -> Iterator[str]:
    from smolagents import OpenAIServerModel

    model = OpenAIServerModel(model_id=GPT, api_base=f"{url}/v1", api_key=key)
    hi = [{"role": "user", "content": [{"type": "text", "text": HI}]}]
    yield str(model.generate(hi).content)
    yield "".join(delta.content or "" for delta in model.generate_stream(hi))


def autogen(url: str, key: str) -> Iterator[str]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def asked() -> AsyncIterator[str]:
        client = OpenAIChatCompletionClient(model=GPT, base_url=f"{url}/v1", api_key=key)
        hi = [UserMessage(content=HI, source="user")]
        yield str((await client.create(hi)).content)
        yield "".join([piece async for piece in client.create_stream(hi) if isinstance(piece, str)])
        agent = AssistantAgent("keeper", client, tools=[open_gate], reflect_on_tool_use=True)
        yield (await agent.run(task=USE)).messages[-1].content

    yield from _run(asked)


def semantic_kernel(url: str, key: str) -> Iterator[str]:
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Gates:
        @kernel_function(name="open_gate")
        def open(self, width: int) -> str:
            return open_gate(width)

    async def asked() -> AsyncIterator[str]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        service = OpenAIChatCompletion(ai_model_id=GPT, async_client=client)
        plain = ChatCompletionAgent(service=service, name="keeper")
        yield str(await plain.get_response(HI))
        yield "".join([str(piece) async for piece in plain.invoke_stream(HI)])
        armed = ChatCompletionAgent(service=service, name="keeper", plugins=[Gates()])
        yield str(await armed.get_response('Use Gates-open_gate {"width": 3}'))

    yield from _run(asked)


def dspy(url: str, key: str) -> Iterator[str]:
    import dspy

    model = dspy.LM(f"openai/{GPT}", api_base=f"{url}/v1", api_key=key, cache=False)
    yield model(HI)[0]


def outlines(url: str, key: str) -> Iterator[str]:
    import outlines
    from openai import OpenAI

    model = outlines.from_openai(OpenAI(base_url=f"{url}/v1", api_key=key), GPT)
    yield model(HI)
    yield "".join(model.stream(HI))


def llm(url: str, key: str) -> Iterator[str]:
    home = Path(os.environ["HOME"])
    os.environ["LLM_USER_PATH"] = str(home)
    row = {"model_id": "tollgate", "model_name": GPT, "api_base": f"{url}/v1", "api_key_name": "tollgate"}
    (home / "extra-openai-models.yaml").write_text(json.dumps([row | {"supports_tools": True}]))
    asked = ("-m", "tollgate", "--key", key)
    yield command("llm", *asked, "--no-stream", HI)
    yield command("llm", *asked, HI)
    tool = 'def open_gate(width: int) -> str:\n    "Open the gate."\n    return f"It is open, {width} wide."'
    yield command("llm", *asked, "--functions", tool, USE)
    WIDTHS.extend([3] * ("3 wide" in command("llm", "logs", "-n", "1", "--json")))


def agno(url: str, key: str) -> Iterator[str]:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=GPT, base_url=f"{url}/v1", api_key=key)
    yield Agent(model=model, telemetry=False).run(HI).content
    chunks = Agent(model=model, telemetry=False).run(HI, stream=True)
    yield "".join(chunk.content or "" for chunk in chunks if chunk.event == "RunContent")
    yield Agent(model=model, tools=[open_gate], telemetry=False).run(USE).content


def strands(url: str, key: str) -> Iterator[str]:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": f"{url}/v1", "api_key": key}, model_id=GPT)
    yield str(Agent(model=model, callback_handler=None)(HI)).strip()
    yield str(Agent(model=model, callback_handler=None, tools=[tool(open_gate)])(USE)).strip()


def crewai(url: str, key: str) -> Iterator[str]:
    from crewai import LLM

    base = {"base_url": f"{url}/v1", "api_key": key}
    yield LLM(model=f"openai/{GPT}", **base).call(HI)
    yield LLM(model=f"openai/{GPT}", stream=True, **base).call(HI)
    messages = [{"role": "user", "content": USE}]
    yield LLM(model=f"openai/{GPT}", **base).call(messages, tools=[TOOL], available_functions={"open_gate": open_gate})


def griptape(url: str, key: str) -> Iterator[str]:
    from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
    from griptape.structures import Agent

    yield Agent(prompt_driver=OpenAiChatPromptDriver(model=GPT, base_url=f"{url}/v1", api_key=key)).run(HI).output.value
    yield (
        Agent(prompt_driver=OpenAiChatPromptDriver(model=GPT, base_url=f"{url}/v1", api_key=key, stream=True))
        .run(HI)
        .output.value
    )


def any_llm(url: str, key: str) -> Iterator[str]:
    from any_llm import completion

    yield from _chats(partial(completion, provider="openai", api_base=f"{url}/v1", api_key=key))


def chatlas(url: str, key: str) -> Iterator[str]:
    from chatlas import ChatAnthropic, ChatOpenAI, ChatOpenAICompletions

    def ask(model: Callable[[], Any]) -> Iterator[str]:
        yield str(model().chat(HI, echo="none"))
        yield "".join(model().stream(HI))
        armed = model()
        armed.register_tool(open_gate)
        yield str(armed.chat(USE, echo="none").get_content()).strip()

    yield from ask(lambda: ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=GPT))
    yield from ask(lambda: ChatOpenAICompletions(base_url=f"{url}/v1", api_key=key, model=GPT))
    yield from ask(lambda: ChatAnthropic(model=CLAUDE, api_key=key, kwargs={"base_url": url}))


def shell_gpt(url: str, key: str) -> Iterator[str]:
    os.environ |= {"API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "DEFAULT_MODEL": GPT, "USE_LITELLM": "false"}
    yield command("sgpt", "--no-functions", "--no-md", "--no-cache", HI)


def inspect_ai(url: str, key: str) -> Iterator[str]:
    from inspect_ai.model import execute_tools, get_model
    from inspect_ai.tool import tool

    @tool(name="open_gate")
    def gate() -> Any:
        async def execute(width: int) -> str:
            """Open the gate.

            Args:
                width: How wide, in metres.
            """
            return open_gate(width)

        return execute

    async def asked() -> AsyncIterator[str]:
        from inspect_ai.model import ChatMessageUser

        for name, base in ((f"openai/{GPT}", f"{url}/v1"), (f"anthropic/{CLAUDE}", url)):
            model = get_model(name, base_url=base, api_key=key)
            yield (await model.generate(HI)).completion
            messages: list[Any] = [ChatMessageUser(content=USE)]
            output = await model.generate(messages, tools=[gate()])
            done = await execute_tools([*messages, output.message], [gate()])
            yield (await model.generate([*messages, output.message, *done.messages], tools=[gate()])).completion

    yield from _run(asked)


def httpie(url: str, key: str) -> Iterator[str]:
    address = ("--ignore-stdin", "-b", "-A", "bearer", "-a", key, f"{url}/v1/chat/completions", f"model={GPT}")
    messages = f"messages:={json.dumps([{'role': 'user', 'content': HI}])}"
    yield json.loads(command("http", *address, messages))["choices"][0]["message"]["content"]
    lines = command("http", "--stream", *address, messages, "stream:=true").split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    yield "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def together(url: str, key: str) -> Iterator[str]:
    from together import Together

    yield from _chats(Together(base_url=url, api_key=key).chat.completions.create)


def swarm(url: str, key: str) -> Iterator[str]:
    from openai import OpenAI
    from swarm import Agent, Swarm

    client = Swarm(OpenAI(base_url=f"{url}/v1", api_key=key))
    yield client.run(Agent(model=GPT), [{"role": "user", "content": HI}]).messages[-1]["content"]
    events = client.run(Agent(model=GPT), [{"role": "user", "content": HI}], stream=True)
    yield "".join(event.get("content") or "" for event in events if "delim" not in event)
    yield client.run(Agent(model=GPT, functions=[open_gate]), [{"role": "user", "content": USE}]).messages[-1][
        "content"
    ]


def main(name: str, url: str, key: str) -> None:
    heard = list(globals()[name](url, key))
    print(json.dumps({"heard": heard, "widths": WIDTHS}), flush=True)
    os._exit(0)  # some wait at their end for a home that they cannot reach


if __name__ == "__main__":
    main(*sys.argv[1:])
