"""What the GPU runners add to vLLM's, with vLLM's own methods left out: those need a GPU."""

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

from picbench.engines.planning.pages import GAP
from picbench.engines.vllm.worker.cuda import runner, runner_v1, worker
from picbench.engines.vllm.worker.cuda.model_state import PicModelState, PlannedSampling
from picbench.engines.vllm.worker.cuda.planned_requests import PlannedRequests
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
