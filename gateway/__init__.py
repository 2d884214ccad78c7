# The service: routes, answering, providers, and the commands that run them.
