# Room for messages on their way over WebSockets, from their first byte until they are decoded: each team has a share,
# as it has of long bodies (gateway/overload/body_memory.py). A message beyond it ends its connection.

from __future__ import annotations

from collections import Counter

from gateway.overload.body_memory import OF_A_TEAM, OF_ALL


class MessageRoom:
    """Counts the bytes of such messages, by team."""

    def __init__(self, of_all: int = OF_ALL, of_a_team: int = OF_A_TEAM) -> None:
        self._of_all = of_all
        self._of_a_team = of_a_team
        self._held: Counter[str] = Counter()
        self._held_by_all = 0

    def take(self, team_id: str, size: int) -> bool:
        """Hold room for ``size`` more bytes; whether there is any. They are held either way."""
        self._held[team_id] += size
        self._held_by_all += size
        return self._held[team_id] <= self._of_a_team and self._held_by_all <= self._of_all

    def give_back(self, team_id: str, size: int) -> None:
        """Hold so many bytes less."""
        self._held[team_id] -= size
        self._held_by_all -= size
        if not self._held[team_id]:
            del self._held[team_id]
