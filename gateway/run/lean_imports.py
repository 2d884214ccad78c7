# What two libraries bring along and no command of this project uses, left out: a gateway or worker starts in a tenth
# less CPU time. Call it before anything imports them; who imports the rest by name later gets it.

from __future__ import annotations

import sys
from types import ModuleType

# SQLAlchemy's asyncio imports its whole mapper of objects for these two; our statements need its core alone.
SESSIONS = ("sqlalchemy.ext.asyncio.scoping", "sqlalchemy.ext.asyncio.session")


def import_leanly() -> None:
    """Import structlog without rich, whose colours our lines of JSON do not have, and SQLAlchemy without its ORM."""
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # not installed, as structlog sees it
        import structlog  # noqa: F401

        del sys.modules["rich"]
    if "sqlalchemy.orm" not in sys.modules:
        sys.modules.update({name: _Unused(name) for name in SESSIONS})
        import sqlalchemy.ext.asyncio  # noqa: F401


class _Unused(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
