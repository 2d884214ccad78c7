# What everything uses and what uses nothing: clock, settings, errors, callers, background tasks.
