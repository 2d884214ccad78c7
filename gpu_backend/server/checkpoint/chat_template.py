# A checkpoint's chat template: messages become the text that the model was trained to continue. Templates are Jinja,
# run in a sandbox under the conventions of Hugging Face transformers (its documentation, "Chat templates").

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpu_backend.server.checkpoint.control_tokens import AddedTokens
from gpu_backend.server.checkpoint.harmony import is_harmony
from gpu_backend.server.checkpoint.tokens import read_json
from gpu_backend.server.checkpoint.tool_calls import OPEN, ToolStyle
from protocol.chat import AudioPart, FilePart, ImagePart, Message, RefusalPart, TextPart, Tool
from protocol.errors import UnsupportedParameter, invalid_param

NO_TOKENS = AddedTokens()


class ChatTemplate:
    """One template, compiled once. ``special_tokens`` are the names it may use: ``bos_token``, ``eos_token``, …

    Where the model ``sees``, it writes a token for each picture.
    In what callers say, control tokens among the vocabulary's ``added_tokens`` are guarded. ``now`` tells the local
    time to templates that write the date. Raises ``ValueError`` for a template with a fault.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        added_tokens: AddedTokens = NO_TOKENS,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        *,
        sees: bool = False,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            takes_tools = "tools" in find_undeclared_variables(parsed)
        except TemplateError as exc:
            raise ValueError(f"the chat template does not compile: {exc}") from exc
        self.tool_style = _tool_style(source) if takes_tools else None
        self.is_harmony = is_harmony(source)
        # How much a model may be told to think before it answers.
        self.efforts = ("low", "medium", "high") if self.is_harmony and "reasoning_effort" in source else ()
        self._sees = sees
        self._special_tokens = dict(special_tokens)
        self._control_tokens = added_tokens.control_tokens(source)
        # A template may look for thoughts in a reply, to leave them out: there they stay as the model wrote them.
        looked_for = _looked_for(parsed)
        marks = [text for text in added_tokens.others if any(text in words for words in looked_for)]
        self._control_tokens_in_replies = added_tokens.control_tokens(source, without=marks)
        self._knows_developers = "developer" in source

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), effort: str | None = None) -> str:
        """Return the conversation as text, ending where the assistant's next turn begins; there it may call ``tools``.

        ``effort`` is one of ``efforts``; None: as the template has it.

        The text has marks where callers wrote control tokens; ``TextCodec.encode`` knows them.
        Raises ``BadRequest`` for what the template or the model cannot take: images, roles in an order it refuses.
        """
        plain = [_plain_message(message, f"messages[{i}]", self._sees) for i, message in enumerate(messages)]
        _name_results(plain)
        for message in plain:
            if message["role"] == "developer" and not self._knows_developers:
                message["role"] = "system"  # many templates leave out what they do not know
        functions = [{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in tools] or None
        options = {} if effort is None else {"reasoning_effort": effort}
        if self.is_harmony:  # its template tells the first call of a turn alone, and takes each tool to be described
            plain = _one_call_a_turn(plain)
            functions = functions and [
                {**tool, "function": {"description": "", **tool["function"]}} for tool in functions
            ]
        try:
            plain = [self._guarded(message) for message in plain]
            functions = functions and [
                {"type": tool["type"], "function": self._control_tokens.guard_all(tool["function"])}
                for tool in functions
            ]
            try:
                return self._render(plain, functions, options)
            except TemplateError:
                single = _one_call_a_turn(plain)
                if len(single) == len(plain):
                    raise
                return self._render(single, functions, options)
        except TemplateError as exc:
            why = exc.message or type(exc).__name__
            raise invalid_param("messages", f"The model's chat template refuses these messages: {why}.") from exc
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as exc:
            raise invalid_param("messages", f"The model's chat template cannot render these messages: {exc}.") from exc

    def _guarded(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with what its caller wrote guarded: all but its role, which is one of a few."""
        guarded = {name: self._control_tokens.guard_all(value) for name, value in message.items() if name != "role"}
        if message["role"] == "assistant" and isinstance(message["content"], str):
            guarded["content"] = self._control_tokens_in_replies.guard(message["content"])
        return {"role": message["role"], **guarded}

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: Mapping[str, str]
    ) -> str:
        return self._template.render(
            messages=messages,
            add_generation_prompt=True,
            tools=tools,
            documents=None,
            **self._special_tokens,
            **options,
        )


class GenerationTag(Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: marks a reply's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _looked_for(template: nodes.Template) -> set[str]:
    """Return the texts that a template compares others with, or hands to their methods: what it looks for in them."""
    places: list[nodes.Node] = list(template.find_all(nodes.Compare))
    places += [
        argument
        for call in template.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr)
        for argument in call.args
    ]
    constants = (const for place in places for const in (place, *place.find_all(nodes.Const)))
    return {const.value for const in constants if isinstance(const, nodes.Const) and isinstance(const.value, str)}


def _tool_style(source: str) -> ToolStyle | None:
    """Return how the template tells the model to write its calls; None for a way that is not read here."""
    if is_harmony(source):
        return ToolStyle.HARMONY
    if OPEN in source and "<function=" not in source:
        return ToolStyle.HERMES
    if '"parameters": ' in source and ("python_tag" in source or "ipython" in source):
        return ToolStyle.LLAMA
    return None


def read_template(folder: Path, tokenizer_config: Mapping[str, Any], *, for_tools: bool = False) -> str | None:
    """Return the source of a checkpoint's default chat template, or None where it has none.

    Some checkpoints have another one ``for_tools``.
    """
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    of_processor = folder / "chat_template.json"  # as models that see had it before transformers 5
    template = read_json(of_processor).get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default")) if for_tools else named.get("default")
    return template


def _plain_message(message: Message, where: str, sees: bool) -> dict[str, Any]:
    """Write a message as templates expect it: text as one string, but parts where pictures are among them; arguments of
    tool calls as objects."""
    plain: dict[str, Any] = {"role": message.role, "content": _plain_content(message, where, sees)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _name_results(plain: Sequence[dict[str, Any]]) -> None:
    """Give results of tools the name of the call that they answer: templates may demand it, OpenAI's clients do not."""
    names = {call["id"]: call["function"]["name"] for message in plain for call in message.get("tool_calls", ())}
    for message in plain:
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def _one_call_a_turn(plain: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let a turn with several calls be several turns, each with its result: Llama's templates refuse it otherwise."""
    told: list[list[dict[str, Any]]] = []
    turns: dict[str, list[dict[str, Any]]] = {}  # of the last such turn: each call's own, with its results, by its id
    for message in plain:
        if message["role"] != "tool":
            turns = {}
        elif (turn := turns.get(message.get("tool_call_id", ""))) is not None:
            turn.append(message)
            continue
        if len(calls := message.get("tool_calls", ())) > 1:
            for call in calls:
                told.append([{**message, "tool_calls": [call]}])
                turns.setdefault(call["id"], told[-1])
        else:
            told.append([message])
    return [message for turn in told for message in turn]


def _plain_content(message: Message, where: str, sees: bool) -> str | list[dict[str, str]]:
    if message.content is None or isinstance(message.content, str):
        return message.content or message.refusal or ""
    words: list[str | None] = []  # None: a picture
    for i, part in enumerate(message.content):
        match part:
            case TextPart(text):
                words.append(text)
            case RefusalPart(refusal):
                words.append(refusal)
            case ImagePart() if sees:
                words.append(None)
            case ImagePart():
                text_only = "This model reads text only; leave the image out."
                raise UnsupportedParameter(text_only, param=f"{where}.content[{i}]")
            case FilePart() | AudioPart():
                words_alone = "This model reads no files and hears nothing; send the text."
                raise UnsupportedParameter(words_alone, param=f"{where}.content[{i}]")
    if None in words:
        return [{"type": "image"} if each is None else {"type": "text", "text": each} for each in words]
    return "".join(each for each in words if each is not None)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
