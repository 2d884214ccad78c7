# Bytes of a streamed body that go out at once: no task, no message of ASGI, nothing awaited. Shared by everything of
# ours that streams over ASGI.

from __future__ import annotations

# An ASGI extension: a function of the server that takes a call's scope, and bytes of the body of its answer, which has
# begun, and of which more will come. It tells whether it could write them: not while the client has too much unread,
# nor once it has left. Given none, it tells whether it could write some.
WRITING = "tollgate.writing"
