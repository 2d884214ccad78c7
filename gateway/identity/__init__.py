# Identity providers: their keys, their tokens, and how people sign in there.
