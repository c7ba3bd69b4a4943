"""CUDA graphs of whole decoding steps in which somebody follows a plan.

Upstream: vllm/v1/worker/gpu/cudagraph_utils.py of vLLM 0.32.0. A graph holds the kernels of one
kind of attention. vLLM's own graphs stay as they are, for steps without planned requests; the ones
here hold both kinds, and steps choose between the two sets.
"""

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager


class PlannedGraphs(ModelCudaGraphManager):
    """The second set of graphs.

    Graphs of the parts between attention layers are the model's and serve both sets.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, mode: CUDAGraphMode, decode_query_len: int
    ) -> None:
        super().__init__(vllm_config, device, mode, decode_query_len)
        self._capture_descs.pop(CUDAGraphMode.PIECEWISE, None)
