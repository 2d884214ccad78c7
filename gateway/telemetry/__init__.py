# What operators see: logs, metrics.
