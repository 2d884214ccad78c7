# Shapes that cross packages: requests, replies, events, usage, errors. Imports nothing else of this repository.
