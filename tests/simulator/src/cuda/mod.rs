//! libcuda: the CUDA driver interface.
