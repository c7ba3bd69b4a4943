"""Times arms on the device: captured once as CUDA graphs, replayed interleaved."""

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from picbench.measure.report import Spread

_WARMUP = 3
#: Milliseconds of launches that a sample has at least.
_SAMPLE_MS = 0.4


def interleave(
    arms: Mapping[str, Callable[[], object]], rounds: int, seed: int
) -> dict[str, list[float]]:
    """Milliseconds of each call of each arm, `rounds` times, in random order within a round.

    Each sample follows an untimed one of the same arm: clocks at the power limit depend on what ran
    before. Without it 256 decoding requests of 32k tokens took 3 % longer in the median than at
    best, and 8 % in the upper quartile (Triton's kernel, an H200).
    """
    replays = {name: _capture(arm) for name, arm in arms.items()}
    repeats = {name: _repeats(replay) for name, replay in replays.items()}
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order, shuffler = list(arms), random.Random(seed)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            _time(replays[name], repeats[name])
            samples[name].append(_time(replays[name], repeats[name]))
    return samples


def paired(own: Sequence[float], base: Sequence[float]) -> Spread:
    """The ratio of two arms' times, paired within a round."""
    return Spread.of([a / b for a, b in zip(own, base, strict=True)])


def _capture(arm: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP):
            arm()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    return graph.replay


def _repeats(replay: Callable[[], None]) -> int:
    replay()
    return max(1, round(_SAMPLE_MS / _time(replay, 1)))


def _time(replay: Callable[[], None], repeats: int) -> float:
    def repeat() -> None:
        for _ in range(repeats):
            replay()

    return elapsed(repeat) / repeats


def elapsed(work: Callable[[], object]) -> float:
    """Milliseconds between the device's reaching `work` and its being done with it."""
    # torch annotates neither events nor streams.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
