# Logs, metrics and traces.
