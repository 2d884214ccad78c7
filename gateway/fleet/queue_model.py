# A replica of the engine as its queue: prompts computed in turn beside the decodes that run, as fast as its measured
# step cost says. It leaps from event to event, so that a decision can play minutes of a pool in milliseconds. Pure.

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from protocol.serving.engine_load import StepCost

STRETCH = 1.5  # a step with prompts in it over its decodes alone, as the engine keeps it
MOST_TOKENS = 8192  # of prompts in a step
LEAST_TOKENS = 16
PLAYED = 400  # calls of a trial
MOST_PLAYED = 8  # replicas of a trial
SPREAD = 0.08  # rates are found to that share
LEAST_RATE = 1e-4  # calls a second, of a pool: where fewer come too late, none comes in time
LEAST_STEP = 1e-6  # seconds, whatever an engine says
LATEST = 3600.0  # seconds: no first token is looked for any later


class QueueModel:
    """One replica in time. ``slots``: replies that run at once."""

    def __init__(self, cost: StepCost, slots: int = 256, now: float = 0.0) -> None:
        self.cost, self.slots, self.now = cost, slots, now
        self.context = 0.0  # tokens that the running replies attend to
        self._waiting: deque[list[float]] = deque()  # arrival, tokens to compute, prompt, reply
        self._ends: list[tuple[float, float]] = []  # of running replies: the step of their end, tokens at their end
        self._steps = 0.0
        self._work = 0.0  # tokens that wait to be computed
        self.first_tokens: list[float] = []  # seconds until each, in the order in which they came

    @property
    def running(self) -> int:
        """How many replies run."""
        return len(self._ends)

    @property
    def waiting(self) -> int:
        """How many prompts wait, the one under way among them."""
        return len(self._waiting)

    @property
    def work(self) -> float:
        """What a new call meets, in tokens to compute; replies that run slow prompts down."""
        return self._work + 16 * len(self._ends)

    def begin(self, running: int, prompt: float, reply: float) -> None:
        """Have so many replies under way, at even distances from their ends."""
        self._ends = [(reply * (place + 1) / running, prompt + reply) for place in range(running)]
        heapify(self._ends)
        self.context += running * (prompt + reply / 2)

    def add(self, arrival: float, prompt: float, reply: float) -> None:
        """Let a call arrive."""
        tokens = prompt + prompt * prompt / 2 * self.cost.pair / self.cost.token if self.cost.token else prompt
        self._waiting.append([arrival, tokens, prompt, reply])
        self._work += tokens

    def run_until(self, until: float) -> None:
        """Let time pass, in leaps during which the same steps follow each other."""
        cost, ends, waiting = self.cost, self._ends, self._waiting
        while self.now < until and (ends or waiting):
            running = len(ends)
            reading = max(cost.fixed + cost.context * self.context, LEAST_STEP)
            seconds = reading + max(cost.weights, cost.token * running)
            chunk = 0.0
            if waiting and running < self.slots:
                room = STRETCH * (seconds + cost.launching) if running else math.inf
                chunk = min(MOST_TOKENS, self._work)
                if cost.token and running:
                    chunk = min(chunk, (room - reading - cost.launching) / cost.token - running)
                chunk = max(chunk, LEAST_TOKENS)
                seconds = reading + cost.launching + max(cost.weights, cost.token * (running + chunk))
            steps = (until - self.now) / seconds
            if chunk:
                steps = min(steps, waiting[0][1] / chunk)
            if ends:
                steps = min(steps, max(0.0, ends[0][0] - self._steps))
            self.now += steps * seconds
            self._steps += steps
            self.context += steps * running
            if chunk:
                head = waiting[0]
                head[1] -= steps * chunk
                self._work = max(0.0, self._work - steps * chunk)
                if head[1] <= 1e-6:
                    waiting.popleft()
                    self.first_tokens.append(self.now - head[0])
                    heappush(ends, (self._steps + head[3], head[2] + head[3]))
                    self.context += head[2]
            while ends and ends[0][0] <= self._steps + 1e-9:
                self.context = max(0.0, self.context - heappop(ends)[1])
        self.now = max(self.now, until)

    def first_token_of_next(self, prompt: float, reply: float) -> float:
        """Let a call arrive now, and return the seconds until its first token, ``LATEST`` at the most."""
        began, due = self.now, len(self.first_tokens) + len(self._waiting) + 1
        self.add(began, prompt, reply)
        while len(self.first_tokens) < due:
            if self.now - began >= LATEST:
                return LATEST
            self.run_until(self.now + 1.0)
        return self.first_tokens[due - 1]


def place(models: Sequence[QueueModel], arrival: float, prompt: float, reply: float) -> None:
    """Let a call arrive at the replica with the least to do."""
    for model in models:
        model.run_until(arrival)
    min(models, key=lambda model: model.work).add(arrival, prompt, reply)


def most_calls(cost: StepCost, slots: int, prompt: float, reply: float, ttft: float, replicas: int) -> float:
    """Return the calls a second, in all, at which TTFT p90 of so many replicas stays below ``ttft``.

    Lengths are known by their means alone; they are taken to scatter as widely as they are long, which those of real
    prompts and replies do. More than eight replicas are taken to bear as much each as eight do.
    """
    played = 1 << (min(replicas, MOST_PLAYED).bit_length() - 1) if replicas else 0
    if not played:
        return 0.0
    return replicas / played * _most_calls(cost, slots, _rounded(prompt), _rounded(reply), ttft, played)


@lru_cache(4096)
def _most_calls(cost: StepCost, slots: int, prompt: float, reply: float, ttft: float, replicas: int) -> float:
    low, high = 0.0, replicas / max(cost.token * prompt, cost.fixed, 1e-6)
    while high - low > SPREAD * high / 2 and high > LEAST_RATE:
        rate = (low + high) / 2
        low, high = (rate, high) if _p90(cost, slots, prompt, reply, rate, replicas) < ttft else (low, rate)
    return low


def _p90(cost: StepCost, slots: int, prompt: float, reply: float, rate: float, replicas: int) -> float:
    dice, at = random.Random(1), 0.0
    models = [QueueModel(cost, slots) for _ in range(replicas)]
    for _ in range(PLAYED * max(1, replicas // 2)):
        at += dice.expovariate(rate)
        place(models, at, max(1.0, dice.expovariate(1 / prompt)), max(1.0, dice.expovariate(1 / reply)))
    for model in models:
        model.run_until(at + 600.0)
    seen = sorted(seconds for model in models for seconds in model.first_tokens)
    return seen[int(0.9 * len(seen))] if len(seen) > 0.9 * PLAYED else math.inf


def _rounded(tokens: float) -> float:
    """Return a length to a tenth: what is played once counts for all that are alike."""
    return float(round(1.1 ** round(math.log(max(tokens, 1.0), 1.1))))
