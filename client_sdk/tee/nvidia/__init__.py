"""The NVIDIA family: GPUs (Hopper, Blackwell) and NVSwitches, evidence of devices beside a machine's own."""
