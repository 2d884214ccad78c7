# The sentence encoder that the classifier reads texts with besides, in a process of its own.
