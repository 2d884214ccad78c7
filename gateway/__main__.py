# The `tollgate` command. Ctrl-C ends it at once, also while it is still importing: Python's own KeyboardInterrupt can
# be swallowed by whatever runs just then. Commands that must tidy up install handlers of their own.

from __future__ import annotations

import signal


def main() -> None:
    """Run `tollgate`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gateway.cli import main as run

    run()


if __name__ == "__main__":
    main()
