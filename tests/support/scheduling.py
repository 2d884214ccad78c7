# Which test process runs what: a file, or the files that tests/support/longest.py says are run together.

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.longest import group_of


class LoadGroupScheduling(LoadFileScheduling):
    """``--dist loadfile``, with groups of files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(super()._split_scope(nodeid).removeprefix("tests/"))

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process more, once it has collected: it begins with a file only when it knows of another, or that
        there is none, and one that took a crashed one's place waited for ever."""
        if node in self.registered_collections:
            super()._reschedule(node)
            while self._pending_of(self.assigned_work[node]) < 2 and not node.shutting_down:
                super()._reschedule(node)
