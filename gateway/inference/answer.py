# One request, one answer: choose, wait for a turn, admit, attempt, settle.

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from billing.core.holds import Hold
from billing.core.records import Status
from gateway.cache.cached_answers import AnswerCache, Looked
from gateway.calls.accounting import CallAccounting
from gateway.calls.answering import Answering
from gateway.calls.call import Call
from gateway.calls.early_leaves import EarlyLeaves
from gateway.calls.hooks import NO_HOOK, HookMaker, KeepEnding
from gateway.contents.store import ContentStore
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.inference.admission import Admission, WithoutRoom
from gateway.inference.attempt import AttemptContext, AttemptLog
from gateway.inference.call_closer import CallCloser
from gateway.inference.dispatcher import Dispatcher
from gateway.inference.failover import FailoverStream
from gateway.inference.hedging import Hedger
from gateway.inference.limiter import SlotGrant, TargetLimiter
from gateway.inference.reply import Reply
from gateway.inference.route_chooser import RouteChooser
from gateway.moderation.input_check import InputCheck, input_check_of
from gateway.moderation.moderator import Moderator
from gateway.moderation.tied_ids import TiedIds, has_ids, names_ids
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.wire.errors import UpstreamFiltered
from protocol.serving.leaving import Client

STAYS = Client()  # for calls that no client's leaving ends


class Replies(Struct, eq=False):
    """Opens the replies of calls whose first token is there."""

    _dispatcher: Dispatcher
    _closer: CallCloser
    _hooks: Sequence[HookMaker]
    cache: AnswerCache
    _contents: ContentStore
    _clock: Clock
    _metrics: Metrics

    def open(
        self,
        context: AttemptContext,
        account: CallAccounting,
        answering: Answering,
        keep_ending: KeepEnding[Reply] | None = None,
        looked: Looked | None = None,
    ) -> Reply:
        """Return the open reply. ``looked``: what the cache had for a call that goes by it."""
        try:
            source = FailoverStream(self._dispatcher, context, answering, self._clock, self._metrics)
            made = [make(context.call, answering.target) for make in self._hooks]
            hooks = [hook for hook in made if hook is not NO_HOOK]
            if has_ids(context.call):  # before the others: what they keep or hold back has no other ids
                hooks.insert(0, TiedIds(self._dispatcher.tie_of(context.call)))
            if looked is not None and not answering.is_kept:  # after the others: it gathers what they let out
                hooks.append(self.cache.keeper(context.call, looked, answering))
            # A line that a batch of its provider has answered is here as it came: the files of its batch have it.
            if account.opened is not None and self._contents.keeps(context.call):
                hooks.append(self._contents.keeper(context.call))
            cache = "off" if looked is None else "hit" if answering.is_kept else "miss"
            return Reply(context, account, source, hooks, self._closer, self._clock, keep_ending, cache)
        except BaseException:
            answering.close()
            self._closer.close_unanswered(context, account, Status.FAILED)
            raise


class Inference(Struct, eq=False):
    """Answers calls."""

    chooser: RouteChooser
    _limiter: TargetLimiter
    admission: Admission
    dispatcher: Dispatcher
    replies: Replies
    closer: CallCloser
    moderator: Moderator
    _early_leaves: EarlyLeaves
    _hedger: Hedger | None = None

    async def answer(self, call: Call, client: Client = STAYS, keep_ending: KeepEnding[Reply] | None = None) -> Reply:
        """Return the open reply to ``call``, its first token read. The caller closes it.

        ``keep_ending`` keeps how the reply ends, before its accounting closes. Raises a ServiceError when no target
        may, can or does answer; then nothing is held and nothing is owed. Cancelled because ``client`` has left, the
        prompt is owed once a commercial upstream had all of it.

        A model for which a limit of the team has no room is left out of the route, as long as another is on it.
        """
        call = await self.moderator.redacted(call)
        if names_ids(call):
            call = self.dispatcher.opened(call)
        while True:
            try:
                return await self._answer_along(call, client, keep_ending)
            except WithoutRoom as exc:
                call = replace(call, without_room={**call.without_room, exc.target.model.name: exc.target.key})

    async def warm_up(self, call: Call) -> Hold:
        """Count a call that is not made, and route it; it costs nothing. Raises as ``answer`` does until then."""
        self.moderator.refuse_paused(call)
        async with self.admission.counted(call.request_id, call.caller, call.limit_headers) as hold:
            await self.chooser.choose(call, self.chooser.health(call.caller.team))
        return hold

    async def _answer_along(self, call: Call, client: Client, keep_ending: KeepEnding[Reply] | None) -> Reply:
        """Answer a call along the route that it has now. Raises as ``answer`` does, and WithoutRoom."""
        turn, looked = await self._turn_of(call)
        check: InputCheck[Answering] | None = None
        try:
            check = input_check_of(self.moderator, call)
            reply = await self._open_reply(call, turn, looked, check, client, keep_ending)
        except BaseException:
            self._limiter.release(turn.slot)
            raise
        finally:
            if check is not None:
                check.stop()
        self._early_leaves.forget_one(call.caller.key_id)
        if check is not None and check.violation is not None:  # the verdict came after the first token
            if isinstance(check.violation, ContentPolicyViolation):
                reply.end_unsent(Status.BLOCKED)
            reply.close()
            raise check.violation
        return reply

    async def _open_reply(
        self,
        call: Call,
        turn: SlotGrant,
        looked: Looked | None,
        check: InputCheck[Answering] | None,
        client: Client,
        keep_ending: KeepEnding[Reply] | None,
    ) -> Reply:
        """Hold what the call may cost, send it, and return its reply; whatever it raises, its accounting is closed."""
        # Who waited held nothing: its hold would have refused its team's other calls.
        kept = None if looked is None else looked.kept
        if kept is None:
            call, account = await self.admission.admit(call, turn.route)
        else:
            account = await self.admission.admit_free(call)
        log = AttemptLog(turn.waited, call.without_room.values())
        lost = Status.SUPERSEDED if call.is_batch_item else Status.FAILED  # should this process die

        def enter() -> None:
            account.enter(call, turn.route, lost)
            client.note_admitted()

        context = self.dispatcher.begin(call, turn.route, log, account.prompt, enter)

        def send() -> Awaitable[Answering]:
            if kept is not None:
                return self.dispatcher.give_kept(context, kept)
            if self._hedger is not None and (after := self._hedger.delay(context)) is not None:
                return self._hedger.try_targets(context, turn.slot, account, client, after)
            return self.dispatcher.try_targets(context, turn.slot)

        try:
            answering = await (send() if check is None else check.send_and_judge(send))
        except BaseException as exc:
            self._close_unanswered(context, account, check, client, exc)
            raise
        return self.replies.open(context, account, answering, keep_ending, looked)

    async def _turn_of(self, call: Call) -> tuple[SlotGrant, Looked | None]:
        """Choose the call's route, look whether the cache answers it, and else wait until it may go along."""
        self.moderator.refuse_paused(call)
        if call.can_be_left:
            self._early_leaves.refuse(call.caller.key_id)
        health = self.chooser.health(call.caller.team)
        route = await self.chooser.choose(call, health)
        looked = await self.replies.cache.look(call, route) if self.replies.cache.takes(call) else None
        if looked is not None and looked.kept is not None:
            return SlotGrant(route), looked
        away = self.dispatcher.refusal(call, route)
        if away is not None and not self._limiter.can_wait(route):
            raise away
        turn = self._limiter.enter(call, route, health) if away is None else None
        return turn or await self._limiter.wait(call, route, health), looked

    def _close_unanswered(
        self,
        context: AttemptContext,
        account: CallAccounting,
        check: InputCheck[Answering] | None,
        client: Client,
        exc: BaseException,
    ) -> None:
        """Close the accounting of a call that has no reply: none came, it is forbidden, or its client left."""
        call = context.call
        if isinstance(exc, UpstreamFiltered):
            self.moderator.note_filtered(call)
        violation = None if check is None else check.violation  # it may coincide with a leaving
        status = _status_unanswered(context, client, violation or exc)
        answering = None if check is None else check.answered
        if answering is not None and (status is Status.BLOCKED or _is_owed_whole(answering, status)):
            reply = self.replies.open(context, account, answering)
            reply.end_unsent(status)
            reply.close()
            return
        if status is Status.INTERRUPTED:
            self._early_leaves.count(call.caller.key_id, call.started)
        self.closer.close_unanswered(context, account, status)


def _status_unanswered(context: AttemptContext, client: Client, why: BaseException) -> Status:
    """Return how a call ends that has no reply: forbidden, left by its client once its prompt is owed, or failed."""
    if isinstance(why, ContentPolicyViolation):
        return Status.BLOCKED
    call, log = context.call, context.log
    has_prompt = log.was_left_waiting or log.has_answered
    return Status.INTERRUPTED if client.has_left and call.can_be_left and has_prompt else Status.FAILED


def _is_owed_whole(answering: Answering, status: Status) -> bool:
    """Whether a whole reply is there for a client that left while its request was still judged."""
    return status is Status.INTERRUPTED and answering.whole is not None
