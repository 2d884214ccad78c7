# At which replica of our engine a prompt is placed, by what each tells that it has cached and by what this process has
# sent there. Time is an argument, in monotonic seconds.

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec

from gateway.overload.slots import Slot
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.inference import Request
from protocol.serving.prompt_marks import MarkedPrompt, marks_of
from router.cached_prompts import NOTHING_FOUND, CachedPrompts, Found
from router.catalog.targets import Target
from router.replicas import NONE_SLOW, Lateness, Prefill, Prefills, Standing, Waiting, by_work, part_of

NOTHING_TOLD: Mapping[str, CachedPrompts] = {}


class Placement:
    """Places prompts, and keeps what replicas have to compute until their slots are given back."""

    def __init__(self, cached: Mapping[str, CachedPrompts] = NOTHING_TOLD) -> None:
        """``cached``: what replicas tell of their caches, by address."""
        self._cached = cached
        self._prefills: dict[str, Prefills] = {}  # by address: of replicas, whether they tell or not
        self._at: dict[Slot, tuple[str, Prefill]] = {}  # where the prompt of a slot's call is
        self._lateness: dict[
            tuple[str, str], Lateness
        ] = {}  # of replicas, by the model and the place where they are peers
        self._waiting: dict[Slot, tuple[Lateness, Waiting]] = {}  # calls whose first tokens have not come
        self._marked: tuple[Request | None, str, MarkedPrompt] = (None, "", MarkedPrompt(0, ()))  # the latest

    @property
    def is_told(self) -> bool:
        """Whether any replica tells what it has cached; then all count, those beside it that do not, too."""
        return bool(self._cached)

    def tells(self, *replicas: Target) -> bool:
        """Whether any of these tells what it has cached."""
        return bool(self._cached) and any(replica.endpoint.base_url in self._cached for replica in replicas)

    def by_work(self, homes: Sequence[Target], request: Request, owner: str) -> list[Target]:
        """Return replicas in the order in which a team's prompt is to try them; ``homes``: as they are where all have
        as much of it, and as much to do."""
        prompt, standings, slow = self.marked(request, owner), [], self.slow_beside(homes[0])
        for replica in homes:
            known, found = self._prefills_at(replica), self._found_at(replica, prompt)
            standings.append(Standing(found, known.uncached, known.running, known.rate, part_of(replica, slow)))
        return by_work(homes, standings, prompt.size)

    def slow_beside(self, replica: Target) -> Mapping[str, float]:
        """Return how many times as late as others' first tokens those of slow replicas come, by their addresses: of a
        replica and its peers."""
        lateness = self._lateness.get(_place_of(replica))
        return NONE_SLOW if lateness is None else lateness.slow

    def slow(self, now: float) -> Mapping[str, float]:
        """Return the same of all replicas, as they are now: it may be long since the last call."""
        for lateness in self._lateness.values():
            lateness.judge(now)
        return {address: times for lateness in self._lateness.values() for address, times in lateness.slow.items()}

    def begin(
        self, slot: Slot, target: Target, request: Request, owner: str, now: float, size: int, priority: str = "normal"
    ) -> None:
        """Note that a prompt goes to a replica, where a call holds a slot. ``size``: bytes of its request."""
        address, uncached = target.endpoint.base_url, size
        if self.is_told:
            prompt = self.marked(request, owner)
            uncached = prompt.size - self._found_at(target, prompt).length
            self._at[slot] = address, self._prefills_at(target).begin(prompt.size, uncached, now)
        lateness = self._lateness.get(_place_of(target))
        if lateness is None:
            lateness = self._lateness[_place_of(target)] = Lateness()
        turn = "batch" if slot.queue is slot.pool.batch else priority
        self._waiting[slot] = lateness, lateness.begin(address, uncached, turn, now)

    def note_first_token(self, slot: Slot, now: float) -> float | None:
        """Note that the prompt of a slot's call is computed. Return the share of it that was expected to be cached,
        where its replica tells."""
        if (known := self._waiting.pop(slot, None)) is not None:
            known[0].note_first_token(known[1], now)
        if slot not in self._at:
            return None
        address, prefill = self._at[slot]
        expected = prefill.expected_hit
        self._prefills[address].note_first_token(prefill, now)
        return expected if address in self._cached else None

    def end(self, slot: Slot, now: float) -> None:
        """Note that the call of a slot is at its replica no more. Twice is once."""
        if (waiting := self._waiting.pop(slot, None)) is not None:
            waiting[0].end(waiting[1], now)
        if (known := self._at.pop(slot, None)) is not None:
            self._prefills[known[0]].end(known[1])

    def header_for(self, request: Request, owner: str, target: Target) -> str:
        """Return what a replica that tells is told of a team's prompt, so that it can tell of it; else nothing."""
        if not self.tells(target):
            return ""
        prompt = self.marked(request, owner)
        return prompt.header() if prompt.marks else ""

    def found_at(self, request: Request, owner: str, target: Target) -> tuple[int, int]:
        """Return the characters of a team's prompt, and how many of them a replica tells that it has cached."""
        prompt = self.marked(request, owner)
        return prompt.size, self._found_at(target, prompt).length

    def marked(self, request: Request, owner: str) -> MarkedPrompt:
        """Return a prompt's marks, its tools before its messages. Those of the latest are kept: they are asked for
        again and again."""
        latest, whose, marked = self._marked
        if latest is request and whose == owner:
            return marked
        match request:
            case ChatRequest(messages=messages, tools=tools):
                prompt = msgspec.json.encode((tools, messages))
            case CompletionRequest(prompt=said):
                prompt = msgspec.json.encode(said)
            case _:
                prompt = b""
        marked = MarkedPrompt(len(prompt), marks_of(prompt, owner))
        self._marked = request, owner, marked
        return marked

    def keep(self, addresses: Container[str]) -> None:
        """Forget replicas at other addresses, once none of their calls is there."""
        gone = [each for each, known in self._prefills.items() if each not in addresses and not known.running]
        for address in gone:
            del self._prefills[address]
        for lateness in self._lateness.values():
            lateness.keep(addresses)

    def _found_at(self, target: Target, prompt: MarkedPrompt) -> Found:
        cached = self._cached.get(target.endpoint.base_url)
        return NOTHING_FOUND if cached is None else cached.find(prompt.marks)

    def _prefills_at(self, target: Target) -> Prefills:
        known = self._prefills.get(target.endpoint.base_url)
        if known is None:
            known = self._prefills[target.endpoint.base_url] = Prefills()
        return known


def _place_of(replica: Target) -> tuple[str, str]:
    return replica.model.name, replica.endpoint.region
