# `tollgate doctor`: looks at everything that a deployment rests on, and says what is wrong and what to do.
