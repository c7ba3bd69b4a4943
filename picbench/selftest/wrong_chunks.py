"""Which wrong chunk stands in for each right one."""

from collections.abc import Sequence
from dataclasses import replace

from picbench.workloads.sample import Sample, SampleSegment


def with_wrong_chunks(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The same prompts; before each chunk, in its document, stands a chunk of another prompt.

    The other prompt is half the workload away, where passages of one source are least likely to
    be neighbours. A chunk that both have in common is not taken. Raises ValueError where no other
    prompt has a chunk.
    """
    half = len(samples) // 2
    return tuple(
        _with_wrong(sample, samples[(index + half) % len(samples)])
        for index, sample in enumerate(samples)
    )


def _with_wrong(sample: Sample, other: Sample) -> Sample:
    right = {chunk.tokens for chunk in sample.chunks}
    wrong = [chunk for chunk in other.chunks if chunk.tokens not in right]
    if not wrong:
        raise ValueError(f"{other.id} has no chunk that {sample.id} has not")
    numbers = iter(range(len(sample.segments)))
    return replace(
        sample,
        segments=tuple(
            _after(segment, wrong[next(numbers) % len(wrong)])
            if segment.kind == "chunk"
            else segment
            for segment in sample.segments
        ),
    )


def _after(chunk: SampleSegment, wrong: SampleSegment) -> SampleSegment:
    return replace(chunk, before=replace(wrong, before=None))
