"""Which CUDA graphs model runner V2 replays, by vLLM's own managers of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from picbench.engines.vllm.worker.cuda.model_state import PicModelState
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
from picbench.engines.vllm.worker.cuda.runner import PicModelRunner, PlannedGraphs

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    only = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: only)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)


def config(mode: CUDAGraphMode) -> Any:
    sizes = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4], max_cudagraph_capture_size=4)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=sizes,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )


def captured(graphs: ModelCudaGraphManager) -> Any:
    """A set as upstream leaves it; without anything to capture it is not captured."""
    graphs._graphs_captured = graphs.needs_capture()
    graphs.graphs = dict.fromkeys(graphs._capture_descs.get(FULL, ()))  # type: ignore[arg-type]
    return graphs


@pytest.mark.parametrize(
    ("mode", "kernels", "decoding", "linking"),
    [
        (BOTH, True, FULL, PIECEWISE),
        (PIECEWISE, True, PIECEWISE, PIECEWISE),
        # PyTorch's attention is in no graph.
        (BOTH, False, PIECEWISE, PIECEWISE),
        (CUDAGraphMode.NONE, True, CUDAGraphMode.NONE, CUDAGraphMode.NONE),
    ],
    ids=str,
)
def test_planned_steps_use_the_graphs_between_attention_layers(
    monkeypatch: pytest.MonkeyPatch,
    send: Any,
    mode: CUDAGraphMode,
    kernels: bool,
    decoding: CUDAGraphMode,
    linking: CUDAGraphMode,
) -> None:
    """Also where none of their own were captured."""
    requests = PlannedRequests(2, None)
    requests.add("planned", send([*range(8, 12), *range(8)], 12), 12)
    own = PlannedGraphs(config(mode), CPU, mode, 1)
    made: Any = object.__new__(PicModelRunner)
    state = object.__new__(PicModelState)
    vars(state)["attention"] = SimpleNamespace(requests=requests)
    vars(made).update(
        model_state=state,
        _stock_graphs=captured(ModelCudaGraphManager(config(mode), CPU, mode, 1)),
        _planned_graphs=captured(own) if kernels else own,
    )
    for computed, scheduled, expected in ((12, 1, decoding), (4, 2, linking)):
        step = SimpleNamespace(
            req_ids=["plain", "planned"],
            idx_mapping_np=np.arange(2),
            num_scheduled_tokens=np.array([1, scheduled]),
        )
        # Upstream's count of a step in which each request decodes.
        found = step, 1 if scheduled == 1 else None
        monkeypatch.setattr(
            GPUModelRunner, "gather_batch_req_state", lambda *args, found=found: found
        )
        made.req_states = SimpleNamespace(num_computed_tokens_np=np.array([30, computed]))
        _, uniform = made.gather_batch_req_state(None, False)
        chosen = made.cudagraph_manager.dispatch(2, 1 + scheduled, uniform, 0)
        assert chosen.cg_mode is expected
