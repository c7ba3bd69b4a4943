"""What the GPU runners add to vLLM's, with vLLM's own methods left out: those need a GPU."""

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from picbench.engines.planning.pages import GAP, TokenIds
from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.scheduler.scheduler import PicAsyncScheduler, PicScheduler
from picbench.engines.vllm.transfer.worker_mixin import ConnectorWorkerMixin
from picbench.engines.vllm.worker.cpu.worker import PicCPUWorker
from picbench.engines.vllm.worker.cuda import runner, runner_v1, worker
from picbench.engines.vllm.worker.cuda.model_state import PicModelState, PlannedSampling
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
from picbench.engines.vllm.worker.cuda.runner import UPSTREAM, PicModelRunner, PlannedGraphs
from picbench.engines.vllm.worker.cuda.worker import PicGPUWorker
from picbench.engines.vllm.worker.slot_map import SLOT_MAP, SlotMap

PAD, VOCABULARY = 3, 50


def bare(kind: type, **fields: Any) -> Any:
    """An object that was not initialised, with some of its fields."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


class Warmed:
    """Stands in for what compiles kernels; `calls` are the arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def warm_up(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture
def without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> None:
        self.model = torch.nn.Module()
        self.model_state = bare(DefaultModelState)

    monkeypatch.setattr(GPUModelRunner, "load_model", load)
    for name in ("select_backend", "check_layers"):
        monkeypatch.setattr(runner, name, lambda *args: None)
    monkeypatch.setattr(runner, "PicModelState", lambda *args: "state")


@pytest.mark.usefixtures("without_a_model")
def test_the_sampler_of_v2_corrects_vllms_states_after_them() -> None:
    upstream = [bare(LogitBiasState), bare(PenaltiesState)]
    made = bare(
        runner.PicModelRunner,
        vllm_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        encoder_cache=None,
        device="cpu",
        sampler=SimpleNamespace(logits_processors=list(upstream)),
    )
    made.load_model()
    *before, last = made.sampler.logits_processors
    assert before == upstream
    assert isinstance(last, PlannedSampling)
    assert made.model_state == "state"


def test_penalties_of_v1_leave_out_what_users_did_not_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = torch.tensor([[7, PAD, 8, PAD], [PAD, 9, 9, VOCABULARY]])
    foreign = SlotMap(((0, 4),), ((GAP, 4),), 4, (PAD,))
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
        for name, extra in {"planned": {SLOT_MAP: foreign}, "plain": None}.items()
    }
    metadata = SimpleNamespace(prompt_token_ids=prompts)
    batch = SimpleNamespace(
        sampling_metadata=metadata, req_ids=["planned", "plain"], vocab_size=VOCABULARY
    )
    counted: list[list[list[int]]] = []

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> None:
        counted.append(self.input_batch.sampling_metadata.prompt_token_ids.tolist())

    monkeypatch.setattr(GPUModelRunnerV1, "_sample", sample)
    made = bare(runner_v1.PicModelRunnerV1, input_batch=batch, requests=requests)
    made._sample(None, None)
    assert counted == [[[7, VOCABULARY, 8, VOCABULARY], [PAD, 9, 9, VOCABULARY]]]


@pytest.mark.parametrize("zeroed", [None, [4, 7]])
def test_transfers_of_v2_start_before_blocks_are_zeroed(
    monkeypatch: pytest.MonkeyPatch, zeroed: list[int] | None
) -> None:
    """Else a block would be stored or copied as zeros, in which a chunk is going to end."""
    done: list[str] = []
    group = SimpleNamespace(handle_preemptions=done.append)
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: group)
    monkeypatch.setattr(GPUModelRunner, "update_requests", lambda *args: done.append("updated"))
    output = SimpleNamespace(new_block_ids_to_zero=zeroed, kv_connector_metadata="commands")
    bare(runner.PicModelRunner).update_requests(output)
    assert done == (["commands", "updated"] if zeroed else ["updated"])


def test_v1_keeps_no_row_for_a_preempted_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one runs in its place, and upstream still knows it."""
    monkeypatch.setattr(GPUModelRunnerV1, "_update_states", lambda *args: "later")
    moved = SlotMap(((4, 16), (20, 4)), ((0, 16), (GAP, 4)), 24)
    params = SimpleNamespace(extra_args={SLOT_MAP: moved}, max_tokens=5)
    asked = SimpleNamespace(sampling_params=params, num_prompt_tokens=20)
    planned = PlannedRequests(1, None)
    attention = SimpleNamespace(requests=planned)
    made = bare(runner_v1.PicModelRunnerV1, attention=attention, _seen=set())
    for known, preempted, scheduled in (
        (["first"], None, ["first"]),
        (["first", "second"], {"first"}, ["second"]),
        (["first"], set(), ["first"]),
    ):
        made.requests = dict.fromkeys(known, asked)
        assert made._update_states(SimpleNamespace(preempted_req_ids=preempted)) == "later"
        made._update_requests(scheduled)
        assert [name for name in ("first", "second") if name in planned] == scheduled


@pytest.mark.parametrize("is_profiling", [False, True])
def test_kernels_are_compiled_once_there_is_a_cache(
    monkeypatch: pytest.MonkeyPatch, is_profiling: bool
) -> None:
    for upstream in (GPUModelRunner, GPUModelRunnerV1):
        monkeypatch.setattr(upstream, "initialize_kv_cache", lambda *args: None)
    monkeypatch.setattr(runner, "PlannedGraphs", lambda *args: None)
    monkeypatch.setattr(runner_v1.PicModelRunnerV1, "get_model", lambda self: "model")
    zeroers: list[str] = []
    for upstream in (GPUModelRunner, GPUModelRunnerV1):
        name = upstream.__module__
        monkeypatch.setattr(upstream, "_init_kv_zero_meta", lambda self, n=name: zeroers.append(n))
    monkeypatch.setattr(GPUModelRunnerV1, "_zero_block_ids", lambda self, ids: zeroers.append(ids))
    graphs = SimpleNamespace(cudagraph_mode=None)
    states = bare(PicModelState, attention=Warmed(), model="model"), Warmed()
    second = bare(
        runner.PicModelRunner,
        model="model",
        model_state=states[0],
        cudagraph_manager=graphs,
        vllm_config=None,
        device=None,
        decode_query_len=1,
    )
    first = bare(runner_v1.PicModelRunnerV1, attention=states[1])
    for made in (second, first):
        made.initialize_kv_cache(None, is_profiling)
    expected = [] if is_profiling else [("model",)]
    assert states[0].attention.calls == states[1].calls == expected
    modules = [GPUModelRunner.__module__, GPUModelRunnerV1.__module__]
    assert zeroers == ([] if is_profiling else [*modules, [0]])


@pytest.mark.parametrize("left", ["stock", "planned"])
@pytest.mark.parametrize("shares", [False, True])
def test_each_set_of_graphs_is_captured_once(
    monkeypatch: pytest.MonkeyPatch, left: str, shares: bool
) -> None:
    """Whichever served the last of the steps that warm up."""
    captured: list[tuple[str, bool | None]] = []

    def capture(self: Any, profile_only: bool = False) -> int:
        captured.append((self.cudagraph_manager, self.model_state._capturing))
        assert self.model_state._batch is None
        return 1

    monkeypatch.setattr(GPUModelRunner, "capture_model", capture)
    attention = SimpleNamespace(
        planner=SimpleNamespace(graphs=True, shares=shares), requests=PlannedRequests(2, None)
    )
    state = bare(PicModelState, attention=attention, _batch="of the last step", _capturing=None)
    made = bare(
        runner.PicModelRunner,
        model_state=state,
        cudagraph_manager=left,
        _stock_graphs="stock",
        _planned_graphs="planned",
        _sharing_graphs="sharing",
    )
    expected = [("stock", None), ("planned", False), ("sharing", True)][: 2 + shares]
    assert made.capture_model() == len(expected)
    assert captured == expected
    assert made.cudagraph_manager == "stock"


def test_graphs_that_memory_is_profiled_with_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream drops its manager to free them, before it allocates the pool."""

    class Manager:
        """Stands in for vLLM's manager of graphs."""

        cudagraph_mode = None

    captured: list[Any] = []

    def initialize(self: Any, *args: Any) -> None:
        self.cudagraph_manager = Manager()

    def capture(self: Any, *, profile_only: bool) -> int:
        captured.append(ref(self.cudagraph_manager))
        return 7

    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", initialize)
    monkeypatch.setattr(GPUModelRunner, "capture_model", capture)
    monkeypatch.setattr(runner, "PlannedGraphs", lambda *args: None)
    attention = SimpleNamespace(requests=PlannedRequests(2, None))
    made = bare(
        runner.PicModelRunner,
        model_state=bare(PicModelState, attention=attention),
        vllm_config=None,
        device=None,
        decode_query_len=1,
        _stock_graphs=None,
    )
    made.initialize_kv_cache(None, True)
    assert made.capture_model(profile_only=True) == 7
    [manager] = captured
    assert manager() is made.cudagraph_manager
    made.cudagraph_manager = None
    gc.collect()
    assert manager() is None


def test_what_v2_reads_of_positions_is_logical(monkeypatch: pytest.MonkeyPatch, send: Any) -> None:
    """RoPE does, and the sampler draws by seed and position."""
    monkeypatch.setattr(DefaultModelState, "prepare_inputs", lambda *args: {})
    requests = PlannedRequests(2, None)
    requests.add("planned", send([*range(4), GAP, GAP, 4, 5], 6), 8)
    state = bare(PicModelState, attention=SimpleNamespace(requests=requests))
    state.begin_step(["planned", "plain"], [8, 30], [1, 1])
    positions, tokens = torch.tensor([8, 30, 0, 0]), torch.tensor([3, 4, 0, 0])
    inputs = SimpleNamespace(positions=positions, input_ids=tokens)
    state.prepare_inputs(inputs, None)
    assert inputs.positions.tolist() == [6, 30, 0, 0]
    assert inputs.input_ids.tolist() == [3, 4, 0, 0]


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_the_worker_compares_rotations(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    monkeypatch.setattr(worker, "rotary_error", lambda *args: error)
    model = SimpleNamespace(get_head_size=lambda: 64, dtype=torch.bfloat16)
    made = bare(
        PicGPUWorker,
        vllm_config=SimpleNamespace(model_config=model),
        model_runner=SimpleNamespace(
            get_model=lambda: "model", attention=SimpleNamespace(rope="rope")
        ),
    )
    [(name, found, tolerance)] = made.self_check()
    assert (name, found) == ("rotary table", error)
    assert 0 < tolerance < 0.5


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


@pytest.fixture
def staged() -> Any:
    """vLLM's writer without its buffers, which need a GPU."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    writer: Any = StagedWriteTensor.__new__(StagedWriteTensor)
    writer._staged_write_indices = []
    writer._staged_write_starts = []
    writer._staged_write_cu_lens = []
    writer._staged_write_contents = TokenIds()
    writer._staged_write_max_len = 0  # of 0.33.0
    return writer


def test_prompts_with_and_without_a_plan_are_staged_one_after_the_other(staged: Any) -> None:
    staged.stage_write(0, 0, TokenIds([1, 2, 3]))
    staged.stage_write(1, 0, [4, 5])
    staged.stage_write(2, 0, TokenIds())
    staged.stage_write_elem(1, 6)
    assert staged._staged_write_cu_lens == [3, 5, 6]
    buffer = np.zeros(8, np.int32)  # as UvaBufferPool.copy_to_uva writes it
    buffer[:6] = staged._staged_write_contents
    assert buffer.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    staged.clear_staged_writes()
    assert len(staged._staged_write_contents) == 0


def test_methods_that_are_extended_are_those_of_the_pinned_release() -> None:
    for owner, name, parameters in UPSTREAM:
        check_signature(getattr(owner, name), parameters)
    check_signature(Worker._make_model_runner, "self")
    check_signature(
        GPUModelRunnerV1._prepare_inputs, "self, scheduler_output, num_scheduled_tokens"
    )
    check_signature(
        GPUModelRunnerV1.initialize_kv_cache,
        "self, kv_cache_config, is_profiling, kv_cache_allocation_context",
    )


def test_every_step_of_a_worker_runs_with_its_own_connector() -> None:
    for name in ("initialize_from_config", "execute_model", "sample_tokens", "shutdown"):
        assert getattr(PicGPUWorker, name) is not getattr(Worker, name)


def test_both_workers_treat_their_connector_alike() -> None:
    shared = [name for name in vars(ConnectorWorkerMixin) if not name.startswith("__")]
    assert "tier_client" in shared
    for name in set(shared) - {"namespace"}:
        assert getattr(PicGPUWorker, name) is getattr(PicCPUWorker, name)


def test_plans_come_before_scheduling_ahead() -> None:
    order = PicAsyncScheduler.__mro__
    assert order.index(PicScheduler) < order.index(AsyncScheduler)
