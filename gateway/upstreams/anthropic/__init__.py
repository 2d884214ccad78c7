# The Anthropic wire format.
