# Which test process runs what: a file, or the files that tests/support/longest.py says are run together.

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

from tests.support.longest import group_of


class LoadGroupScheduling(LoadFileScheduling):
    """``--dist loadfile``, with groups of files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(super()._split_scope(nodeid).removeprefix("tests/"))
