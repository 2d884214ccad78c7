# Processes: serve, work, reload, children that are kept alive, what makes them start and run faster.
