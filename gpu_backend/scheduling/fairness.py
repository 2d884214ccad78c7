# The fair queue. Each tier has one queue per tenant, and the tenant served least, for its weight, goes next
# (virtual token counters: Sheng et al., OSDI 2024), or one hardly ahead of it whose prompt is cached (as in DLPM: Cao
# et al. 2025). docs/fairness.md derives how far two tenants can drift apart.

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count, islice

from gpu_backend.step.messages import PRIORITIES
from gpu_backend.step.sequence import Sequence

PROMPT_TOKEN = 1.0  # service of computing one token of a prompt; one found in the cache is none
REPLY_TOKEN = 2.0  # service of generating one token
IDLE_ACCOUNTS = 1024  # kept at least, before those that no longer matter are forgotten
MOST_PASSED = 16  # later ones, for the sake of what is cached; then it is one's turn
CANDIDATES = 64  # requests that are looked up for one choice
TENANTS = 32  # whose requests these are, at most


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's standing in one tier. Service is divided by the weight that its request came with."""

    tenant: str
    served: float
    newcomers: deque[Sequence] = field(default_factory=deque)  # waiting for their first blocks
    promised: dict[float, int] = field(default_factory=dict)  # tokens its replies may still generate, by weight
    admitted: int = 0  # replies that have or had blocks, and have not ended
    is_ranked: bool = False

    def promise(self, weight: float, num_tokens: int) -> None:
        """Let replies of a weight generate so many tokens more, or less."""
        left = self.promised.get(weight, 0) + num_tokens
        if left:
            self.promised[weight] = left
        else:
            self.promised.pop(weight, None)

    def owed(self) -> float:
        """Return the weighted service of all that its replies may still generate."""
        return sum(REPLY_TOKEN * num_tokens / weight for weight, num_tokens in self.promised.items())


class FairQueue:
    """The waiting sequences of one tier: newcomers by tenant, and before them the preempted, which keep their place.

    Of newcomers whose tenant's counter is at most ``lead`` above the lowest one, that of whose prompt most is cached
    goes next; ``num_cached`` tells how much. The one that would be next by the counters alone is passed
    ``MOST_PASSED`` times at most, and so is every sequence by later ones of its own queue, of higher priority or not.

    ``clock`` is the highest counter that was the lowest of all that wait when a newcomer was admitted. No waiting
    tenant stands below it, and none stands more than ``bound`` above it.
    """

    def __init__(self, lead: float = 0.0, num_cached: Callable[[Sequence], int] = lambda sequence: 0) -> None:
        self.clock = 0.0
        self._lead = lead
        self._num_cached = num_cached
        self._largest = 0.0  # weighted service that an admission so far allows
        self._choice: Sequence | None = None  # the next sequence, while nothing has changed
        self._accounts: dict[str, Account] = {}
        self._ranking: list[tuple[float, int, Account]] = []  # a heap; counters only grow, so old entries come up early
        self._returning: list[Sequence] = []  # preempted, in the order of their first admission
        self._num_waiting = 0  # newcomers
        self._order = count()
        self._keep = IDLE_ACCOUNTS

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, in no particular order."""
        yield from self._returning
        for account in self._accounts.values():
            yield from account.newcomers

    @property
    def bound(self) -> float:
        """How far two that wait can drift apart, in weighted service, by what was admitted so far."""
        return self._largest + self._lead

    def __len__(self) -> int:
        """How many wait, further replies to prompts that are being computed left out."""
        return self._num_waiting + len(self._returning)

    def num_waiting_of(self, tenant: str) -> int:
        """How many newcomers of one tenant wait."""
        account = self._accounts.get(tenant)
        return len(account.newcomers) if account else 0

    def add(self, sequence: Sequence) -> None:
        """Let a newcomer wait at the end of its tenant's queue, or before what has a lower priority and was not passed
        too often. An idle tenant starts no lower than the clock.
        """
        account = self._accounts.get(sequence.tenant)
        if account is None:
            self._forget_idle()
            account = self._accounts[sequence.tenant] = Account(sequence.tenant, self.clock)
        place = len(account.newcomers)
        while place and _gives_way(account.newcomers[place - 1], sequence):
            place -= 1
            account.newcomers[place].tenancy.passed += 1
        account.newcomers.insert(place, sequence)
        self._num_waiting += 1
        self._rank(account)
        self.reconsider()

    def add_first(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences of a tenant that is being served wait at the front of its queue, in this order."""
        for sequence in reversed(list(sequences)):
            account = self._accounts[sequence.tenant]
            account.newcomers.appendleft(sequence)
            self._num_waiting += 1
            self._rank(account)
        self.reconsider()

    def put_back(self, sequence: Sequence) -> None:
        """Let a preempted sequence wait before all newcomers, by its place."""
        insort(self._returning, sequence, key=lambda other: other.tenancy.place)

    def head(self) -> Sequence | None:
        """Return the next sequence, or None if none waits."""
        if self._returning or not self._lead:
            return self.first()
        least = self._least_served()
        if least is None:
            return None
        if self._choice is None or not self._may_go(self._accounts[self._choice.tenant], least):
            self._choice = self._choose(least)
        return self._choice

    def first(self) -> Sequence | None:
        """Return the sequence whose turn it is, whatever is cached, or None if none waits."""
        return self._returning[0] if self._returning else self.newcomer()

    def newcomer(self) -> Sequence | None:
        """Return the newcomer whose turn it would be if none had been preempted, whatever is cached."""
        account = self._least_served()
        return account.newcomers[0] if account else None

    def returning(self) -> list[Sequence]:
        """Return each tenant's first preempted sequence."""
        return list({sequence.tenant: sequence for sequence in reversed(self._returning)}.values())

    def reconsider(self) -> None:
        """Choose anew at the next call of ``head``: what is cached has changed, or which sequences wait."""
        self._choice = None

    def pop(self, sequence: Sequence, most_tokens: int) -> None:
        """Take one out that was preempted, or the newcomer whose turn it is, nearly.

        A newcomer may generate ``most_tokens``; call ``charge_prompt`` for it.
        """
        if sequence.is_preempted:
            self._returning.remove(sequence)
            return
        least, account = self._least_served(), self._accounts[sequence.tenant]
        assert least and self._may_go(account, least), "another sequence goes next"
        if account is not least:
            least.newcomers[0].tenancy.passed += 1
        place = account.newcomers.index(sequence)
        for earlier in islice(account.newcomers, place):
            earlier.tenancy.passed += 1
        del account.newcomers[place]
        self._num_waiting -= 1
        self.clock = max(self.clock, least.served)
        account.admitted += 1
        account.promise(sequence.request.weight, most_tokens)
        sequence.tenancy.promised, sequence.tenancy.num_charged = most_tokens, len(sequence.token_ids)
        self.reconsider()

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Record the prompt tokens that a newcomer has computed for it."""
        account = self._accounts[sequence.tenant]
        service = PROMPT_TOKEN * num_tokens / sequence.request.weight
        self._largest = max(self._largest, service + account.owed())
        account.served += service

    def charge_reply(self, sequence: Sequence) -> None:
        """Record what an admitted sequence generated since the last time."""
        tenancy = sequence.tenancy
        fresh = len(sequence.token_ids) - tenancy.num_charged
        if fresh:
            account = self._accounts[sequence.tenant]
            account.served += REPLY_TOKEN * fresh / sequence.request.weight
            account.promise(sequence.request.weight, -fresh)
            tenancy.promised -= fresh
            tenancy.num_charged += fresh

    def remove(self, sequence: Sequence) -> None:
        """Let a waiting sequence go."""
        if sequence.is_preempted:
            self._returning.remove(sequence)
            self.leave(sequence)
        else:
            self._accounts[sequence.tenant].newcomers.remove(sequence)
            self._num_waiting -= 1
            self.reconsider()

    def leave(self, sequence: Sequence) -> None:
        """Record the end of an admitted sequence."""
        self.charge_reply(sequence)
        account = self._accounts[sequence.tenant]
        account.promise(sequence.request.weight, -sequence.tenancy.promised)
        account.admitted -= 1

    def gap(self) -> float:
        """Return how far the counters of tenants with newcomers lie apart."""
        served = [account.served for account in self._accounts.values() if account.newcomers]
        return max(served) - min(served) if served else 0.0

    def counters(self) -> dict[str, float]:
        """Return every known tenant's weighted service."""
        return {account.tenant: account.served for account in self._accounts.values()}

    def check(self, admitted: Iterable[Sequence]) -> None:
        """Assert that the accounting adds up, given every sequence that was admitted and has not ended."""
        left = dict.fromkeys(self._accounts, 0)
        for sequence in admitted:
            left[sequence.tenant] += sequence.tenancy.promised
        newcomers = sum(len(account.newcomers) for account in self._accounts.values())
        assert self._num_waiting == newcomers, "newcomers differ"
        for account in self._accounts.values():
            promised = sum(account.promised.values())
            assert promised == left[account.tenant] >= 0, "an account promises what no sequence holds"
            assert not account.newcomers or account.served >= self.clock, "a waiting tenant stands below the clock"
            assert account.is_ranked or not account.newcomers, "a tenant that waits has no rank"
            assert account.served <= self.clock + self.bound + 1e-6 * self.bound, "a tenant was served beyond the bound"
            assert all(s.tenancy.passed <= MOST_PASSED for s in account.newcomers), "a sequence was passed too often"
        assert self.gap() <= self.bound + 1e-6 * self.bound, "two tenants that wait are too far apart"

    def _choose(self, least: Account) -> Sequence:
        """Return that of whose prompt most is cached, of those whose turn it nearly is; of equal ones the first."""
        best, most = least.newcomers[0], 0
        ranked = (account for _, _, account in islice(self._ranking, TENANTS))  # the first of a heap are low
        near = [account for account in ranked if account.newcomers and self._may_go(account, least)]
        for account in sorted(near, key=lambda account: account.served):
            for sequence in islice(account.newcomers, CANDIDATES // len(near)):
                found = self._num_cached(sequence)
                if found > most:
                    best, most = sequence, found
                if sequence.tenancy.passed >= MOST_PASSED:
                    break
        return best

    def _may_go(self, account: Account, least: Account) -> bool:
        is_near = account.served <= least.served + self._lead and least.newcomers[0].tenancy.passed < MOST_PASSED
        return is_near or account is least

    def _least_served(self) -> Account | None:
        ranking = self._ranking
        while ranking:
            served, order, account = ranking[0]
            if not account.newcomers:
                heappop(ranking)
                account.is_ranked = False
            elif served < account.served:
                heapreplace(ranking, (account.served, order, account))
            else:
                return account
        return None

    def _rank(self, account: Account) -> None:
        if len(account.newcomers) == 1:
            account.served = max(account.served, self.clock)
        if not account.is_ranked:
            account.is_ranked = True
            heappush(self._ranking, (account.served, next(self._order), account))

    def _forget_idle(self) -> None:
        """Drop accounts of tenants that have nothing here, when there are many: no bound is about them."""
        if len(self._accounts) < self._keep:
            return
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.newcomers or account.admitted or account.is_ranked
        }
        self._keep = max(IDLE_ACCOUNTS, 2 * len(self._accounts))


def _gives_way(earlier: Sequence, later: Sequence) -> bool:
    first, second = (PRIORITIES.index(sequence.request.priority) for sequence in (earlier, later))
    return first < second and earlier.tenancy.passed < MOST_PASSED
