# The engine's process as the front sees it: calls, restarts, metrics, errors.
