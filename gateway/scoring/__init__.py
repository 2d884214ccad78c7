# What scores without a deployment: texts from a pipe, and outcomes from a file.
