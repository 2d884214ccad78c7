# The OpenAI wire format.
