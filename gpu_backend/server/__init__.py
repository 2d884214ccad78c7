# The engine's HTTP front: OpenAI's dialect outside, commands and events inside. Nothing here imports torch; the model
# runs in a process of its own.
