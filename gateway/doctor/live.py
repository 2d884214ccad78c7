# `tollgate doctor --live`: small calls at a provider with the owner's own keys, each only while its dearest outcome
# fits under the cap; what came is judged, and kept as a recording.

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from billing.core.money import NanoDollars, to_nano, to_text
from billing.core.prices import cost_of, most_cost
from gateway.calls.accumulate import Collector
from gateway.core.settings import ProviderSettings, Settings
from gateway.doctor.findings import Finding, fault, ok, warning
from gateway.doctor.judging import REFUSALS, Answered, Limits, complaints
from gateway.doctor.live_calls import LiveCall, calls_for
from gateway.doctor.recording import Recording
from gateway.model_facts.listed_models import NoPrice
from gateway.model_facts.price_library import listed_model
from gateway.terminal.printing import fail
from gateway.upstreams.client import LONGEST_REPLY, UpstreamClient, UpstreamResponse
from gateway.upstreams.registry import FORMATS, ProviderRegistry
from gateway.upstreams.wire.base import Asking, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamRefused
from gateway.upstreams.wire.unsayable import without_fields
from protocol.chat import ChatReply
from protocol.events import Delta, UsageReport
from protocol.usage import Usage
from router.catalog.targets import Capability, ModelSpec, Target
from router.prompt_size.bounds import with_output_limit
from router.prompt_size.prompt_bounds import bound_prompt

WRONG_KEY = "tollgate-doctor-wrong-key"
# What each format refuses by its type or range.
BAD_VALUES: dict[str, dict[str, Any]] = {
    "openai": {"temperature": 99},
    "anthropic": {"stop_sequences": 7},
    "gemini": {"contents": 7},
    "bedrock": {"stop_sequences": 7},
}
NO_MODEL = "tollgate-doctor-no-such-model"
RECORDINGS = Path("recordings")
MINOR = ("was not read from a cache", "asked for ", "no price is known")  # worth a look, and no fault of the format's


async def look_live(
    settings: Settings, names: Sequence[str], model: str | None, cap: Decimal, folder: Path | None
) -> list[Finding]:
    """Return what calls at each provider show; ``cap``: dollars for each. Exits 2 for a name that is none."""
    chosen = [_cheapest(settings, provider, model) for provider in _providers(settings, names)]
    found, client = [], UpstreamClient()
    try:
        for target in filter(None, chosen):
            patient = LiveLook(settings, client, target, to_nano(cap))
            found += await patient.look()
            provider = re.sub(r"\W+", "-", f"{target.model.provider}-{target.model.upstream_model}")
            path = (folder or RECORDINGS) / f"{provider}.yaml"
            spent = f"{to_text(patient.spent)} USD spent at the most"
            try:
                patient.recording.write(path)
            except OSError as exc:
                words = f"{spent}; {path} cannot be written: {exc.strerror}"
                found.append(warning(target.model.provider, words, "name a folder with --record"))
            else:
                words = f"{spent}; what was answered lies in {path}, without secrets"
                found.append(ok(target.model.provider, words))
    finally:
        await client.close()
    if not any(chosen):
        fail("there is nothing to call: no provider of the file has a model for chats, at a known price", 2)
    return found


class LiveLook:
    """The calls at one target, one after another."""

    def __init__(self, settings: Settings, client: UpstreamClient, target: Target, cap: NanoDollars) -> None:
        self._client = client
        self._registry = ProviderRegistry(settings.providers)
        self._target = target
        self._provider = settings.providers[target.model.provider]
        self._wire = FORMATS[self._provider.format]
        self._left = cap
        self._cap = cap
        self._prompts: dict[bool, int] = {}  # tokens of the plain prompt, by whether it was streamed
        keys = (*self._provider.api_keys, *self._provider.headers.values(), WRONG_KEY)
        self.recording = Recording(keys)

    @property
    def spent(self) -> NanoDollars:
        """What the calls have cost, or could have where that was not told."""
        return NanoDollars(self._cap - self._left)

    async def look(self) -> list[Finding]:
        """Make the calls and return what each shows."""
        found = [self._price()]
        for call in calls_for(self._target.model, self._provider.format):
            found.append(await self._look_at(call))
        if len({*self._prompts.values()}) > 1:
            words = f"the same prompt has {self._prompts[False]} tokens whole and {self._prompts[True]} streamed"
            found.append(
                fault(f"{self._provider.name}: usage", words, "one of the two is billed wrongly: ask the provider")
            )
        return found

    def _spend(self, cost: NanoDollars) -> None:
        self._left = NanoDollars(self._left - max(0, cost))

    async def _look_at(self, call: LiveCall) -> Finding:
        part, spec = f"{self._provider.name}: {call.name}", self._target.model
        prompt = call.most_prompt or bound_prompt(call.request).closely().tokens_on(spec)
        output = call.request.output_limit or 0
        dearest = most_cost(Usage(input_tokens=prompt, output_tokens=output), spec.price)
        if dearest > self._left:
            words = f"left out: it could cost {to_text(dearest)} USD, and {to_text(self._left)} USD are left"
            return warning(part, words, "a higher --most-usd, or a cheaper --model, makes room")
        began = time.perf_counter()
        try:
            answered = await self._ask(call)
        except UpstreamFailure as exc:
            self._spend(dearest)
            return fault(part, exc.message, "look at the provider's status page; is its base_url right?")
        if answered is None:
            self._spend(dearest)
            return ok(part, "its connection was closed; a provider may charge what it had written by then")
        cost = cost_of(answered.usage, spec.price) if answered.usage is not None else dearest
        self._spend(cost if answered.status < 400 else NanoDollars(0))
        if call.name in ("whole", "stream") and answered.usage is not None:
            self._prompts[call.streams] = answered.usage.input_tokens
        said = list(complaints(call, answered, Limits(prompt, output, cost), spec.upstream_model))
        if not said:
            told = f"{1000 * (time.perf_counter() - began):.0f} ms"
            return ok(part, f"{answered.status}, {told}, {to_text(cost if answered.status < 400 else 0)} USD")
        is_minor = all(any(words in each for words in MINOR) for each in said)
        remedy = (
            "the recording has the answer; compare it with the provider's pages, and report it if the format is wrong"
        )
        return (warning if is_minor else fault)(part, "; ".join(said), remedy)

    async def _ask(self, call: LiveCall) -> Answered | None:
        """Return what comes of a call; ``None`` of one that is left. Raises UpstreamFailure where nothing comes."""
        quirks = self._registry.quirks.of(self._target, time.monotonic())
        token = await self._registry.token_for(self._target, self._client, time.monotonic())
        while True:
            asking = self._asking(call, token)
            built = self._registry.dress(self._wire.build_request(replace(asking, quirks=quirks)), self._target)
            answered = await self._exchange(call, built)
            failure = None if answered is None else answered.failure
            adapted = quirks.adapted_to(failure, False) if isinstance(failure, UpstreamRefused) else None
            if adapted is None or call.shows in REFUSALS:
                return answered
            quirks = adapted

    def _asking(self, call: LiveCall, token: str | None) -> Asking:
        target, key = self._target, self._registry.next_key_at(self._target)
        if call.shows == "unknown_model":
            target = Target(replace(target.model, upstream_model=NO_MODEL), target.endpoint)
        if call.shows == "bad_key":
            key, token = WRONG_KEY, None
        request, _ = without_fields(with_output_limit(call.request, None), self._provider.drop_fields)
        native = call.native if self._provider.format in ("anthropic", "bedrock") else None
        return Asking(
            request=request,
            target=target,
            api_key=key,
            token=token,
            streams=call.streams,
            native=native,
            extra=BAD_VALUES[self._provider.format] if call.shows == "bad_value" else {},
            api_version=self._provider.api_version,
        )

    async def _exchange(self, call: LiveCall, built: UpstreamRequest) -> Answered | None:
        times = self._provider.timeouts
        response = await self._client.send(built, times.connect, times.first_token)
        try:
            if call.shows == "left" and response.status == 200:
                await response.next_piece(times.first_token)
                return None
            async with asyncio.timeout(times.total):
                body = await response.read(LONGEST_REPLY)
        except TimeoutError as exc:
            raise UpstreamError("The answer did not come to its end in time.", outcome="timeout") from exc
        finally:
            response.close()
        self.recording.add(call.name, built.url, built.body, response.status, response.headers, body)
        return self._read(call, response, body)

    def _read(self, call: LiveCall, response: UpstreamResponse, body: bytes) -> Answered:
        status, request = response.status, call.request
        if status >= 400:
            return Answered(status=status, body=body, failure=self._wire.read_error(status, response.headers, body))
        try:
            if not call.streams:
                reply, usage = self._wire.read_reply(request, body)
                assert isinstance(reply, ChatReply)
                return Answered(status=status, body=body, reply=reply, usage=usage)
            events, collector = self._wire.open_events(request), Collector(request)
            told: Usage | None = None
            for event in [*events.feed(body), *events.finish()]:
                if isinstance(event, Delta):
                    collector.add(event)
                elif isinstance(event, UsageReport):
                    told = event.usage
            if events.failure is not None:
                raise events.failure
            streamed = collector.reply()
            assert isinstance(streamed, ChatReply)
            return Answered(status=status, body=body, reply=streamed, usage=told)
        except UpstreamFailure as exc:
            return Answered(status=status, body=body, failure=exc)

    def _price(self) -> Finding:
        """Return how the file's price of the model stands to the price library's."""
        part, spec = f"{self._provider.name}: price", self._target.model
        listed = listed_model(spec.upstream_model, provider=spec.provider, base_url=self._target.endpoint.base_url)
        words = f"{spec.upstream_model} at {to_text(spec.price.input)} and {to_text(spec.price.output)} USD per million"
        if isinstance(listed, NoPrice) or listed.price is None:
            return ok(part, f"{words}, by the file alone")
        if (spec.price.input, spec.price.output) == (listed.price.input, listed.price.output):
            return ok(part, f"{words}, as the price library has it")
        theirs = f"{to_text(listed.price.input)} and {to_text(listed.price.output)}"
        return warning(
            part, f"{words}; the price library has {theirs}", "correct `price`, if it is not a price of your own"
        )


def _providers(settings: Settings, names: Sequence[str]) -> list[ProviderSettings]:
    for name in names:
        if name not in settings.providers:
            fail(f"no provider {name!r} with a key: there are {', '.join(settings.providers) or 'none'}", 2)
    return [one for one in settings.providers.values() if (one.name in names if names else not one.self_hosted)]


def _cheapest(settings: Settings, provider: ProviderSettings, named: str | None) -> Target | None:
    """Return the model of a provider that is called: ``named``, or the cheapest for chats; ``None`` without one."""
    everywhere = [
        one for model in settings.models.values() for one in model.everywhere if one.provider == provider.name
    ]
    fitting: list[ModelSpec] = [one for one in everywhere if Capability.CHAT in one.capabilities]
    fitting = [one for one in fitting if named in (None, one.name)]
    if not fitting or not provider.endpoints:
        return None
    cheapest = min(fitting, key=lambda one: (one.price.output + one.price.input, one.name))
    return Target(cheapest, provider.endpoints[0])
