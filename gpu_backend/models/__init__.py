# Model architectures, their weights and how these are quantized and cut across ranks.
