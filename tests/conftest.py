"""Settings that hold before any library is imported."""

import os

# Test processes share the cores; OpenMP threads that spin for each other slow all of them down
# (measured on two cores with five processes: 20 times).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
