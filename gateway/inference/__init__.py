# The pipeline of one call: choose, wait, admit, attempt, reply, settle; and calls answered once.
