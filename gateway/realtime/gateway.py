# Opens conversations: a route is chosen as for any call, the first response held, and the targets tried in their order
# until one opens its side. Until then a refusal is an answer of HTTP.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

from msgspec.structs import replace

from gateway.calls.accounting import CallAccounting
from gateway.calls.call import Call
from gateway.calls.unanswered import Tried, failed_at, none_may_be_asked, told_of_all
from gateway.core.clock import Clock
from gateway.core.errors import Unavailable
from gateway.core.settings import ProviderSettings
from gateway.inference.admission import WithoutRoom
from gateway.inference.answer import Inference
from gateway.inference.edition import Edition
from gateway.moderation.input_check import input_check_of
from gateway.moderation.moderator import Moderator
from gateway.realtime.client_events import ClientEvent, texts_in
from gateway.realtime.relay import Names, Relay
from gateway.realtime.turns import Books, Renew, Turns
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers, Permit
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.resilience.retry import OF_THE_KEY
from gateway.upstreams.socket import UpstreamSocket
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamUnable
from protocol.chat import ChatRequest, Message
from protocol.errors import ServiceError, UnsupportedParameter
from router.catalog.targets import Capability, Route, Target
from router.choose import permitted_name


class Realtime:
    """Opens the conversations of one process."""

    def __init__(self, client: UpstreamClient, breakers: Breakers, moderator: Moderator, clock: Clock) -> None:
        self._client, self._breakers, self._moderator, self._clock = client, breakers, moderator, clock

    async def open(
        self, current: Callable[[], Edition], call: Call, renew: Renew, refused: Callable[[ServiceError], None]
    ) -> Relay:
        """Return the open conversation that a call asks for; its caller runs or closes it. ``current`` returns what is
        configured now, ``renew`` a call for each response that follows, as its caller may ask it then; ``refused``
        hears why one is not held.

        Raises a ServiceError when no target may, can or does open it; then nothing is held and nothing is owed.
        """
        self._check_policy(call)
        edition = current()
        inference = edition.inference
        call, route, account = await _admitted(inference, call)
        try:
            target, permit, socket = await self._connect_along(edition.providers, call, route)
        except BaseException:
            inference.admission.settle(account)
            raise
        began, team = self._clock.monotonic(), call.caller.team.id
        books = Books(inference.admission, inference.closer, self._clock, refused)

        async def renewed() -> Call:
            asked = await renew()
            self._check_policy(asked)
            edition = current()
            permitted_name(asked.request.model, asked.routing, edition.catalog)
            turns.go_by(_as_configured(target, edition))
            return asked

        turns = Turns(call, account, replace(route, targets=(target,)), books, renewed)
        pace = JudgedPace()
        return Relay(
            socket,
            turns,
            Names(call.request.model, target.model.upstream_model, target.model.max_output),
            lambda event: self._judge(turns.call, event, pace),
            self._clock.new_id,
            lambda failure: self._breakers.broke(permit, began, failure, team, 0),
        )

    def _check_policy(self, call: Call) -> None:
        """Raise what the content policy has against a conversation, or its next response."""
        self._moderator.refuse_paused(call)
        policy = self._moderator.policy_for(call)
        if policy is not None and (policy.redacted_groups("input") or policy.redacted_groups("output")):
            words = "The content policy takes personal data out of texts, which cannot be done with what is spoken."
            raise UnsupportedParameter(words, param="model")

    async def _judge(self, call: Call, event: ClientEvent, pace: JudgedPace) -> None:
        """Judge what an event says as the input of a chat is, in its turn: no limit counts events. Raises
        ContentPolicyViolation, ContentUnchecked."""
        turns = tuple([Message(role, text) for role, text in texts_in(event)])
        if not turns:
            return
        size = sum(len(turn.text()) for turn in turns)
        chat = ChatRequest(model=call.request.model, messages=turns)
        check = input_check_of(self._moderator, replace(call, request=chat, size=size))
        if check is None:
            return
        await asyncio.sleep(pace.take(self._clock.monotonic(), size))
        try:
            await check.send_and_judge(_nothing)
        finally:
            check.stop()
        if check.violation is not None:
            raise check.violation

    async def _connect_along(
        self, providers: ProviderRegistry, call: Call, route: Route
    ) -> tuple[Target, Permit, UpstreamSocket]:
        """Return the first target that opens its side, and that. Raises the last failure, which tells of all."""
        tried: list[Tried] = []
        failure: UpstreamFailure | None = None
        for target in route.targets:
            try:
                return target, *await self._connect_at(providers, call, target)
            except UpstreamFailure as exc:
                exc.facts = failed_at(call, target)
                if not exc.moves_on:
                    raise
                failure = exc
                tried.append((target, exc))
            except TargetAway as exc:
                tried.append((target, exc))
        raise none_may_be_asked(call, tried) if failure is None else told_of_all(call, tried, failure)

    async def _connect_at(
        self, providers: ProviderRegistry, call: Call, target: Target
    ) -> tuple[Permit, UpstreamSocket]:
        """Ask one target, with one key after the other. Raises UpstreamFailure, TargetAway."""
        while True:
            permit = await self._breakers.enter(target)
            try:
                socket = await self._connect_once(providers, target, permit)
            except UpstreamFailure as exc:
                self._breakers.failed(permit, exc, call.caller.team.id, 0)
                if exc.outcome not in OF_THE_KEY or not self._breakers.has_other_key(permit):
                    raise
            except BaseException:
                self._breakers.abandoned(permit)
                raise
            else:
                self._breakers.succeeded(permit)
                return permit, socket

    async def _connect_once(self, providers: ProviderRegistry, target: Target, permit: Permit) -> UpstreamSocket:
        provider = providers.settings_at(target)
        if provider.format != "openai":
            raise UpstreamUnable("The upstream has no conversations by voice.", param="model")
        token = await providers.token_for(target, self._client, self._clock.monotonic())
        built = providers.dress(_opening(target, provider, permit.api_key, token), target)
        times = provider.timeouts
        socket = await self._client.open_socket(built, times.connect, times.first_token)
        if socket.status == 101:
            self._breakers.heard(permit, socket.headers)
            return socket
        socket.abort()
        raise providers.format(provider.name).read_error(socket.status, socket.headers, socket.body)


def _opening(target: Target, provider: ProviderSettings, api_key: str | None, token: str | None) -> UpstreamRequest:
    """Return what opens a conversation: at OpenAI and what is like it, or at a deployment of Azure's."""
    base_url, model = target.endpoint.base_url, quote(target.model.upstream_model, safe="")
    if provider.api_version is None:
        url = f"{base_url}/realtime?model={model}"
    else:
        version = quote(provider.api_version, safe="")
        url = f"{base_url}/openai/realtime?api-version={version}&deployment={model}"
    if api_key and provider.api_version:
        return UpstreamRequest("GET", url, {"api-key": api_key}, b"")
    secret = token or api_key
    return UpstreamRequest("GET", url, {"authorization": f"Bearer {secret}"} if secret else {}, b"")


def _as_configured(target: Target, edition: Edition) -> Target:
    """Return a target with its model as that is configured now, at the price of now. Raises Unavailable where the
    conversation could not be opened there any more."""
    model, provider = edition.catalog.models.get(target.model.name), target.model.provider
    places = edition.settings.providers[provider].endpoints if provider in edition.settings.providers else ()
    for one in model.everywhere if model is not None and target.endpoint in places else ():
        same = one.provider == provider and one.upstream_model == target.model.upstream_model
        if same and Capability.REALTIME in one.capabilities:
            return replace(target, model=one)
    raise Unavailable("What serves this conversation is configured otherwise now: open another connection.")


async def _admitted(inference: Inference, call: Call) -> tuple[Call, Route, CallAccounting]:
    """Return a call, its route, and what is held for the first response on it. Raises what refuses it."""
    while True:
        route = await inference.chooser.choose(call, inference.chooser.health(call.caller.team))
        try:
            admitted, account = await inference.admission.admit(call, route)
        except WithoutRoom as exc:
            call = replace(call, without_room={**call.without_room, exc.target.model.name: exc.target.key})
        else:
            return admitted, route, account


class JudgedPace:
    """How fast one conversation is judged: ``A_SECOND`` events or as many pages, and as many at once as come in
    ``AHEAD`` seconds. What comes faster waits, and its client with it."""

    A_SECOND, PAGE, AHEAD = 10, 4096, 20.0

    def __init__(self) -> None:
        self._paid_at = 0.0  # monotonic seconds, when what was judged has had its time

    def take(self, now: float, characters: int) -> float:
        """Return the seconds until an event of so many characters may be judged."""
        wait = max(0.0, self._paid_at - now - self.AHEAD)
        self._paid_at = max(self._paid_at, now) + (1 + characters // self.PAGE) / self.A_SECOND
        return wait


class _Nothing:
    def close(self) -> None:
        """There is nothing to close."""


async def _nothing() -> _Nothing:
    """A conversation is judged event by event: each is sent once it was."""
    return _Nothing()
