# What a process had when it died, until the next one goes on with it; and what may have been the cause, tried apart.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gpu_backend.server.client.engine_call import EngineCall
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.step.messages import Embed, Generate

MOST_DEATHS = 2  # of processes that had a call: then it is tried apart from others that had as many, and given up after
DIED = "The engine's process died while it worked on this request. Try again."

Send = Callable[[EngineCall, Sequence[Generate | Embed]], None]


class CallRecovery:
    """Keeps calls from one process to the next, which ``send`` hands them to.

    Of those that several processes died of one at a time is on trial, until the engine has computed for it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[EngineCall] = []
        self._suspects: deque[EngineCall] = deque()
        self._on_trial: EngineCall | None = None

    def __len__(self) -> int:
        """How many wait for the next process."""
        return len(self._held)

    def take(self, calls: Iterable[EngineCall]) -> None:
        """Keep what the dead process had, in order, but for those that are given up now."""
        for call in calls:
            call.deaths += 1
            if call.fails_over or call.deaths > MOST_DEATHS:
                call.fail(EngineFailed(DIED))
            else:
                self._held.append(call)
        self._held += self._suspects
        self._suspects.clear()
        self._on_trial = None

    def resume(self) -> None:
        """Hand the process that is ready now what the dead one had."""
        held, self._held = self._held, []
        for call in held:
            if call.deaths < MOST_DEATHS:
                self._send(call, call.resume_commands())
            else:
                self._suspects.append(call)
        self._try_next()

    def end_trial(self, call: EngineCall) -> None:
        """Let the next one in, if ``call`` was on trial: the engine has computed for it, and lives."""
        if call is self._on_trial:
            self._try_next()

    def fail(self, message: str) -> None:
        """Tell those that wait that nothing will come."""
        held, self._held = self._held, []
        for call in held:
            call.fail(EngineFailed(message))

    def _try_next(self) -> None:
        """Hand over the next of the calls that are tried one after the other."""
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            call = self._suspects.popleft()
            if commands := call.resume_commands():
                self._on_trial = call
                self._send(call, commands)
