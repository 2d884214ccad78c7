# One call for replies: what the engine is asked, and the pieces of all its replies as they come. Streamed and plain
# answers both read it; they differ only in what they do with the pieces.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from gpu_backend.server.checkpoint.checkpoint import Checkpoint
from gpu_backend.server.checkpoint.harmony import HarmonyDetokenizer
from gpu_backend.server.client.engine_call import EngineCall
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.errors import DeadlineExceeded, EngineFailed
from gpu_backend.server.metrics import Metrics
from gpu_backend.server.reply import Piece, ReplyWriter
from gpu_backend.server.requests.bodies import Sender
from gpu_backend.server.requests.transfer import TransferParams
from gpu_backend.server.wire import UsageBody
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.messages import Embedding, FinishReason, Generate, NewTokens
from gpu_backend.step.picture import Picture
from gpu_backend.step.plan import TokenLogprob
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.transfer import HeldBlocks
from protocol.errors import invalid_param
from protocol.serving.prompt_marks import tokens_of_marks


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request for replies: ``n`` to each prompt, numbered prompt by prompt."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int
    sender: Sender
    pictures: tuple[Picture, ...] = ()  # of the only prompt
    stops: tuple[str, ...] = ()
    resumed: tuple[int, ...] = ()
    skip: int = 0  # characters of the resumed reply that its reader has
    grammar_field: str | None = None  # the request's field that the grammar comes from
    adapter: Adapter | None = None
    cache_salt: str | None = None
    transfer: TransferParams | None = None  # what is asked of its prompt's blocks
    new_detokenizer: Callable[[], HarmonyDetokenizer] | None = None  # for each reply; None: what tokens say is text

    @property
    def num_replies(self) -> int:
        """Replies to all prompts together."""
        return len(self.prompts) * self.n


class Generation:
    """A running job. Close it, whatever happens.

    Raises ``Overloaded`` if the engine takes nothing now, and ``BadRequest`` for a reply that cannot be resumed so.
    """

    def __init__(
        self,
        job: Job,
        request_id: str,
        engine: EngineClient,
        checkpoint: Checkpoint,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._gaps = metrics.gaps_of(job.sender.tenant)
        self._last_tokens: dict[tuple[str, int], float] = {}  # when each reply's came
        self._writers = {
            (f"{request_id}-{i}", j): ReplyWriter(
                i * job.n + j,
                checkpoint.codec,
                job.sampling,
                job.stops,
                checkpoint.eos_token_ids,
                job.resumed,
                job.skip,
                job.new_detokenizer and job.new_detokenizer(),
            )
            for i in range(len(job.prompts))
            for j in range(job.n)
        }
        self._prompt_scores: dict[str, tuple[TokenLogprob, ...]] = {}  # by the engine's request id
        self._scored: set[int] = set()  # replies whose first piece had its prompt's scores
        self.held: HeldBlocks | None = None  # for another engine, if that was asked for
        self._call: EngineCall | None = None
        if any(writer.finish_reason is None for writer in self._writers.values()):
            commands = [self._command(f"{request_id}-{i}", p) for i, p in enumerate(job.prompts)]
            self._call = engine.call(commands, fails_over=job.sender.fails_over)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Yield what the replies gain, as it comes, until all have ended.

        Raises ``EngineFailed``, and ``DeadlineExceeded`` when the sender's time is up.
        """
        beginnings = [writer.beginning for writer in self._writers.values() if writer.beginning is not None]
        if beginnings:
            yield beginnings
        while self._call is not None and not self._call.is_finished:
            events = await self._events(self._call)
            written = [self._write(event) for event in events if isinstance(event, NewTokens)]
            if pieces := [piece for piece in written if piece is not None]:
                yield pieces
        self._count()

    def usage(self) -> UsageBody:
        """Return what the job used so far. A resumed reply counts whole, as if it had never been interrupted."""
        writers = list(self._writers.values())
        firsts = writers[:: self._job.n]  # the replies to one prompt share its cache hit
        timings = [writer.timings for writer in writers if writer.timings is not None]
        return UsageBody.of(
            prompt_tokens=sum(map(len, self._job.prompts)),
            completion_tokens=sum(writer.num_tokens for writer in writers),
            cached_tokens=sum(writer.cached_tokens for writer in firsts),
            timings=timings,
        )

    def close(self) -> None:
        """Free what the engine still holds for this job. What has not ended by now was given up by its client."""
        if self._call is not None:
            given_up = sum(writer.finish_reason is None for writer in self._writers.values())
            self._metrics.count_given_up(given_up, self._job.sender.tenant)
            self._call.close()

    async def _events(self, call: EngineCall) -> list[NewTokens | Embedding]:
        deadline_ms = self._job.sender.deadline_ms
        if deadline_ms is None:
            return await call.events()
        left = self._started + deadline_ms / 1000 - self._clock()
        try:
            async with asyncio.timeout(left):
                return await call.events()
        except TimeoutError as exc:
            raise DeadlineExceeded(f"The reply was not finished within its {deadline_ms} ms.") from exc

    def _command(self, request_id: str, prompt: tuple[int, ...]) -> Generate:
        job = self._job
        return Generate(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=replace(job.sampling, max_tokens=max(job.sampling.max_tokens, 1)),
            n=job.n,
            tenant=job.sender.tenant,
            cache_salt=job.cache_salt,
            weight=job.sender.weight,
            tier=job.sender.tier,
            priority=job.sender.priority,
            deadline_ms=job.sender.deadline_ms,
            resume_token_ids=job.resumed,
            prompt_marks=tokens_of_marks(job.sender.marks, len(prompt)) if len(job.prompts) == 1 else (),
            adapter=job.adapter,
            pictures=job.pictures,
            remote=job.transfer.remote if job.transfer else None,
            holds_blocks=job.transfer is not None and job.transfer.do_remote_decode,
        )

    def _write(self, event: NewTokens) -> Piece | None:
        assert self._call is not None
        writer = self._writers[event.request_id, event.reply_index]
        had_ended = writer.finish_reason is not None
        if event.is_bad_grammar:
            field = self._job.grammar_field
            assert field is not None, "a grammar comes from a field"
            raise invalid_param(field, f"'{field}' cannot be followed: {event.error}.")
        if event.finish_reason is FinishReason.ERROR:
            raise EngineFailed(f"The engine could not finish this reply: {event.error}.")
        if event.finish_reason is FinishReason.ABORT and not had_ended:
            raise EngineFailed("The engine gave this reply up before its end.")
        self.held = event.held or self.held
        if event.token_ids:
            self._note_time(event)
        piece = writer.write(event)
        if writer.finish_reason is not None and not had_ended and event.finish_reason is None:
            self._call.stop_reply(event.request_id, event.reply_index)  # its text has ended; the engine does not know
        return self._with_prompt_scores(piece, event)

    def _note_time(self, event: NewTokens) -> None:
        now, reply = self._clock(), (event.request_id, event.reply_index)
        if self._first_token is None:
            self._first_token = now
        if (last := self._last_tokens.get(reply)) is not None:
            self._gaps.observe(now - last)
        self._last_tokens[reply] = now

    def _with_prompt_scores(self, piece: Piece | None, event: NewTokens) -> Piece | None:
        """Add to a reply's first piece what its prompt's first reply reported: it has its first token before others."""
        if self._job.sampling.prompt_logprobs is None:
            return piece
        self._prompt_scores.setdefault(event.request_id, event.prompt_scores)
        if piece is None or piece.index in self._scored:
            return piece
        self._scored.add(piece.index)
        return replace(piece, prompt_scores=self._prompt_scores[event.request_id])

    def _count(self) -> None:
        now = self._clock()
        self._metrics.count_generation(
            self.usage(),
            [writer.finish_reason.value for writer in self._writers.values() if writer.finish_reason is not None],
            time_to_first_token=(self._first_token or now) - self._started,
            latency=now - self._started,
            tier=self._job.sender.tier,
            tenant=self._job.sender.tenant,
        )
