# `tollgate chat MODEL`: a conversation at the terminal, streamed, with what each answer cost; or one question from the
# command line or a pipe.

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import typer

from gateway.terminal.address import KeyOption, UrlOption
from gateway.terminal.printing import printable
from gateway.terminal.remote_gateway import GatewayFault, RemoteGateway, remote_gateway

CHAT = "/v1/chat/completions"
HELP = "/new forgets the conversation, /model NAME asks another model from here on, /help, /quit (or Ctrl-D)"
CANCELLED = 130  # exit status, as a shell has it

Message = dict[str, str]


def command(
    model: Annotated[str, typer.Argument(help="A name of `tollgate models`, such as auto")],
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it a conversation, or a pipe's text")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most of each answer")] = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Talk with a model; the conversation is sent along. Ctrl-C ends an answer, Ctrl-D the conversation.

    Answers go to standard output; which model answered, tokens and cost to standard error.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with remote_gateway(url, key) as gateway:
        talk = Conversation(gateway, model, system, max_tokens)
        if prompt is None and sys.stdin.isatty():
            talk.go_on()
            return
        try:
            talk.ask(prompt if prompt is not None else sys.stdin.read())
        except KeyboardInterrupt:
            raise typer.Exit(CANCELLED) from None


class Conversation:
    """What was said, and the model that is asked next."""

    def __init__(self, gateway: RemoteGateway, model: str, system: str | None, max_tokens: int | None) -> None:
        self._gateway = gateway
        self._model = model
        self._begun: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._more = {} if max_tokens is None else {"max_tokens": max_tokens}
        self.messages = list(self._begun)

    def go_on(self) -> None:
        """Read questions from the terminal until it ends."""
        with suppress(ImportError):  # lines can then be edited, and found again with the arrow keys
            import readline  # noqa: F401
        _note(HELP)
        while True:
            try:
                said = input(f"{self._model}> ").strip()
            except EOFError:
                print()  # noqa: T201
                return
            except KeyboardInterrupt:
                print()  # noqa: T201
                continue
            if said in ("/quit", "/exit"):
                return
            if said.startswith("/"):
                self._obey(said)
            elif said:
                try:
                    self.ask(said)
                except KeyboardInterrupt:
                    _note("\nstopped; what came so far is charged")
                except GatewayFault as exc:
                    _note(str(exc))

    def ask(self, said: str) -> None:
        """Send a question with what was said before, and print the answer as it comes. Both are kept if it comes.

        Raises GatewayFault.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": said}]
        words: list[str] = []
        told: dict[str, Any] = {}
        try:
            for piece in self._answer(asked, told):
                words.append(piece)
                sys.stdout.write(printable(piece, "\n\t") if sys.stdout.isatty() else piece)
                sys.stdout.flush()
        finally:
            if words:
                sys.stdout.write("\n")
                sys.stdout.flush()
                self.messages = [*asked, {"role": "assistant", "content": "".join(words)}]
        _note(_summary(told))

    def _answer(self, asked: list[Message], told: dict[str, Any]) -> Iterator[str]:
        """Yield an answer's words; ``told`` gets what is said beside them: who answered, usage, why it ended."""
        body = {"model": self._model, "messages": asked, "stream": True, "stream_options": {"include_usage": True}}
        for data in self._gateway.events(CHAT, body | self._more):
            chunk = msgspec.json.decode(data)
            if "error" in chunk:
                raise GatewayFault(f"the answer broke off: {chunk['error'].get('message')}")
            told |= {name: chunk[name] for name in ("model_used", "usage") if chunk.get(name)}
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta") or {}
                if text := delta.get("content") or delta.get("refusal"):
                    yield text
                if choice.get("finish_reason"):
                    told["finish_reason"] = choice["finish_reason"]

    def _obey(self, said: str) -> None:
        word, _, rest = said.partition(" ")
        if word == "/new":
            self.messages = list(self._begun)
        elif word == "/model" and rest.strip():
            self._model = rest.strip()
        else:
            _note(HELP)


def _summary(told: dict[str, Any]) -> str:
    usage = told.get("usage") or {}
    parts = [str(told.get("model_used", ""))]
    if told.get("finish_reason") not in (None, "stop"):
        parts.append(f"ended by {told['finish_reason']}")
    if "completion_tokens" in usage:
        parts.append(f"{usage.get('prompt_tokens')} tokens in, {usage['completion_tokens']} out")
    if "cost_usd" in usage:
        parts.append(f"${usage['cost_usd']}")
    return ", ".join(filter(None, parts))


def _note(words: str) -> None:
    sys.stderr.write(printable(words, "\n") + "\n")
    sys.stderr.flush()
