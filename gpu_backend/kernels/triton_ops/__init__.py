# The kernels in Triton.
