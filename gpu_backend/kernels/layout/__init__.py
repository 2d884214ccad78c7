# Where sequences lie in device memory, as tensors that kernels read.
