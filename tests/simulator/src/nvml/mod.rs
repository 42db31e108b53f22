//! libnvidia-ml: the NVML interface.
