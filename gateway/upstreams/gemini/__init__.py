# The Gemini wire format.
