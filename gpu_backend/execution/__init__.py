# Computes one step plan at a time: runner, CUDA graphs, draft model, ranks.
