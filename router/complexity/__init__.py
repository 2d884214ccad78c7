# The classifier that tells when a small model suffices.
