# Callbacks: signed events to the teams' own servers, from an outbox, at least once, and never into our own network.
