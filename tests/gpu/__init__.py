# What only a GPU can show, as one program: `python -m tests.gpu`. It needs torch and transformers' own dependencies,
# but no test runner, so that it starts on a bare GPU image; every check runs on the CPU too.
