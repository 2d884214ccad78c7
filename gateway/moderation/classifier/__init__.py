# The classifiers of texts, and what they read of a text.
