"""What vLLM's sampler on a GPU is told of planned requests, with its own states on a CPU."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.states import RequestState

from picbench.engines.algorithms import parse
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.vllm.worker.cuda.model_state import PlannedSampling, drop_bit
from picbench.engines.vllm.worker.slot_map import SLOT_MAP, SlotMap
from picbench.errors import EngineError

VOCABULARY = 100
STOP = 99


@pytest.fixture(autouse=True)
def without_pinned_memory(monkeypatch):
    """vLLM takes it for available where pinned memory is not."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


class Sampling:
    """vLLM's request states and logits processors, with picbench's after them."""

    def __init__(self) -> None:
        config: Any = SimpleNamespace()
        device = torch.device("cpu")
        self.tokens: dict[int, list[int]] = {}
        self.states = RequestState(4, 256, 256, 0, VOCABULARY, device)
        shared = LogitsProcRequestState.from_request_state(self.states)
        self.penalties = PenaltiesState(config, shared)
        self.biases = LogitBiasState(config, shared)
        self.processors: list[Any] = [self.biases, self.penalties]
        self.processors.append(PlannedSampling.of(self.processors))

    def add(self, name: str, tokens: list[int], params: Any, generated: int = 0) -> int:
        """Add a request as vLLM's runner does; its row."""
        prompt = len(tokens)
        self.states.add_request(name, prompt, tokens + [5] * generated, 0, 8)
        row = self.states.req_id_to_index[name]
        self.tokens[row] = tokens
        for processor in self.processors:
            processor.add_request(row, params)
        return row

    def count(self) -> None:
        """Apply what was staged, with `bincount` in torch: its kernel needs a GPU."""
        for row in self.penalties._new_penalties_reqs:
            self.penalties.prompt_bin_mask[row] = pack(set(self.tokens[row]))
        self.penalties._new_penalties_reqs.clear()
        for processor in self.processors:
            processor.apply_staged_writes()


def pack(tokens: Iterable[int]) -> torch.Tensor:
    words = torch.zeros(-(-VOCABULARY // 32), dtype=torch.int64)
    for token in tokens:
        words[token // 32] |= 1 << (token % 32)
    return words.to(torch.int32)


def unpack(words: torch.Tensor) -> set[int]:
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.flatten().nonzero().flatten().tolist())


def plan(algorithm: str, pad: int, *segments: Segment) -> Plan:
    chosen = parse(algorithm)
    layout = LayoutConfig(scope="", pad=chosen.pads, pad_token=pad, bos_token=1)
    return lay_out(list(segments), chosen.plan_chunk, layout)


def params(planned: Plan | None, **given: Any) -> SamplingParams:
    extra = {SLOT_MAP: SlotMap.of(planned)} if planned is not None else None
    return SamplingParams(extra_args=extra, stop_token_ids=[STOP], **given)


TEXT = Segment(tuple(range(10, 27)))
CHUNK = Segment(tuple(range(30, 67)), chunk=True)


@pytest.mark.parametrize("pad", [0, 31, 63, 95])
@pytest.mark.parametrize("algorithm", ["mepic", "mepic:pad=paper", "epic:k=4:pad=paper"])
@pytest.mark.parametrize("generated", [0, 2])
def test_penalties_count_what_the_user_sent(pad, algorithm, generated):
    sampling = Sampling()
    sent = {*TEXT.tokens, *CHUNK.tokens}
    planned = plan(algorithm, pad, TEXT, CHUNK, TEXT)
    plain = list(planned.tokens)
    rows = {}
    for name, given in (("planned", planned), ("plain", None)):
        asked = params(given, repetition_penalty=1.2)
        rows[name] = sampling.add(name, plain, asked, generated)
    sampling.count()
    mask = sampling.penalties.prompt_bin_mask
    assert unpack(mask[rows["planned"]]) == sent
    assert unpack(mask[rows["plain"]]) == set(plain)


def test_generation_starts_at_its_logical_position():
    """`min_tokens` is compared with positions, and slots outnumber these."""
    sampling = Sampling()
    planned = plan("mepic", 0, TEXT, CHUNK, TEXT)
    assert len(planned.tokens) > planned.end
    row = sampling.add("planned", list(planned.tokens), params(planned, min_tokens=3))
    assert sampling.biases.min_lens.np[row] == planned.end + 3
    row = sampling.add("plain", [3] * 40, params(None, min_tokens=3))
    assert sampling.biases.min_lens.np[row] == 43


@pytest.mark.parametrize("bit", range(64))
def test_one_bit_is_dropped(bit):
    words = torch.full((2,), -1, dtype=torch.int32)
    drop_bit(words, bit)
    assert unpack(words) == set(range(64)) - {bit}


def test_another_sampler_is_refused():
    with pytest.raises(EngineError, match="other logits processors"):
        PlannedSampling.of([])
