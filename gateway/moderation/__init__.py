# The content policy while calls run: checks of input and output, the outside checker, abuse.
