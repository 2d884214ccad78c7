# Requests that wait for their grammar: they stand in no queue of the scheduler before it is compiled, so that no
# other request waits for it.

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from gpu_backend.step.grammar import TOO_SLOW, BadGrammar, Constraint, GrammarCompiler
from gpu_backend.step.messages import Event, FinishReason, Generate, NewTokens
from gpu_backend.step.sequence import Sequence

NOT_HERE = "this engine was started without a tokenizer for grammars"


@dataclass(slots=True)
class _Compiling:
    command: Generate
    replies: list[Sequence]
    grammar: Future[Constraint]


class GrammarQueue:
    """Owns the sequences of requests whose grammars are being compiled. Without a compiler, it refuses them."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[str, _Compiling] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._waiting.values():
            yield from waiting.replies

    def add(self, command: Generate, replies: list[Sequence]) -> None:
        """Keep a request until its grammar is compiled."""
        assert command.sampling.grammar is not None
        if self._compiler is not None:
            compiled = self._compiler.compile(command.sampling.grammar)
        else:
            compiled = Future()
            compiled.set_exception(BadGrammar(NOT_HERE))
        self._waiting[command.request_id] = _Compiling(command, replies, compiled)

    def abort(self, request_id: str, reply_index: int | None) -> list[Event]:
        """Let a waiting request go, or one of its replies; return their last events."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return []
        leaving = [reply for reply in waiting.replies if reply_index in (None, reply.reply_index)]
        for reply in leaving:
            waiting.replies.remove(reply)
        if not waiting.replies:
            del self._waiting[request_id]
        return [NewTokens(request_id, reply.reply_index, (), finish_reason=FinishReason.ABORT) for reply in leaving]

    def compiled(self, patience: float) -> Iterator[tuple[Generate, list[Sequence], str | None]]:
        """Take out the requests that are ready, each with what is wrong with its grammar, if anything is.

        Waits at most ``patience`` seconds for the first of them.
        """
        if self._waiting and patience:
            wait([waiting.grammar for waiting in self._waiting.values()], patience, FIRST_COMPLETED)
        for waiting in [some for some in self._waiting.values() if some.grammar.done()]:
            del self._waiting[waiting.command.request_id]
            yield waiting.command, waiting.replies, _constrain(waiting)


def _constrain(waiting: _Compiling) -> str | None:
    """Give each reply its constraint, moved past what another replica generated; return what is wrong, if anything."""
    if (error := waiting.grammar.exception()) is not None:
        return f"{error}" if isinstance(error, BadGrammar) else f"{type(error).__name__}: {error}"
    if (compiled := waiting.grammar.result()).rules.are_slow:
        return TOO_SLOW
    for reply in waiting.replies:
        reply.constraint = compiled.copy()
    resumed = waiting.command.resume_token_ids
    if resumed and (problem := waiting.replies[0].constraint.accept(resumed)):  # type: ignore[union-attr]
        return f"the resumed tokens do not follow it: {problem}"
    return None
