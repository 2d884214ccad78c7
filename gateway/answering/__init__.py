# One request, one answer.
