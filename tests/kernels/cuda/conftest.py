"""Where the tests of Triton kernels run: on a GPU, or in Triton's interpreter."""

import os

import torch

# Triton decides when a kernel is defined whether it is compiled or interpreted, for the whole
# process; `test_interpreter.py` runs `device` in a process of its own.
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["device"]
