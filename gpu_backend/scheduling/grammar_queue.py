# Requests that wait for their grammar: they stand in no queue of the scheduler before it is compiled, so that no
# other request waits for it.

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from gpu_backend.step.grammar import TOO_SLOW, BadGrammar, Constraint, GrammarCompiler
from gpu_backend.step.messages import Generate
from gpu_backend.step.sequence import Sequence

NOT_HERE = "this engine was started without a tokenizer for grammars"


@dataclass(slots=True, eq=False)
class _Compiling:
    command: Generate
    replies: list[Sequence]
    grammar: Future[Constraint]


class GrammarQueue:
    """Keeps requests whose grammars are being compiled; without a compiler, it refuses them.

    The caller owns their lists of replies: a request that has none left is forgotten.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: list[_Compiling] = []

    def __len__(self) -> int:
        return sum(bool(waiting.replies) for waiting in self._waiting)

    def add(self, command: Generate, replies: list[Sequence]) -> None:
        """Keep a request until its grammar is compiled."""
        assert command.sampling.grammar is not None
        if self._compiler is not None:
            compiled = self._compiler.compile(command.sampling.grammar)
        else:
            compiled = Future()
            compiled.set_exception(BadGrammar(NOT_HERE))
        self._waiting.append(_Compiling(command, replies, compiled))

    def compiled(self, patience: float) -> Iterator[tuple[Generate, list[Sequence], str | None]]:
        """Take out the requests that are ready, each with what is wrong with its grammar, if anything is.

        Waits at most ``patience`` seconds for the first of them.
        """
        waiting = [each for each in self._waiting if each.replies]
        if waiting and patience:
            wait([each.grammar for each in waiting], patience, FIRST_COMPLETED)
        ready = [each for each in waiting if each.grammar.done()]
        self._waiting = [each for each in waiting if each not in ready]
        for each in ready:
            yield each.command, each.replies, _constrain(each)


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
