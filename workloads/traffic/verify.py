"""Whether a request file was made for a model's tokenizer."""

from collections.abc import Iterator
from pathlib import Path

from picbench.errors import ConfigError
from picbench.workloads.prompts.tokens import Tokenizer, begin, encode
from picbench.workloads.sample import SampleSegment
from picbench.workloads.traffic.draw import Stream


def check_tokens(stream: Stream, tokenizer: Tokenizer, path: Path) -> None:
    """Raise ConfigError unless `tokenizer` turns every text of `stream` into the ids beside it.

    Parts without text, random tokens, are passed over.
    """
    segments = tuple(dict.fromkeys(segment for segment in _segments(stream) if segment.text))
    for segment, ids in zip(segments, encode(tokenizer, [s.text for s in segments]), strict=True):
        if segment.tokens not in (ids, begin(tokenizer, ids)):
            raise ConfigError(
                f"`requests` {path}: its token ids are not those of `model`'s tokenizer "
                f"(first seen at {segment.text[:40]!r})",
                hint="make the file anew for this model: picbench traffic `model`",
            )


def _segments(stream: Stream) -> Iterator[SampleSegment]:
    yield from stream.preload
    for sample in stream.samples:
        yield from sample.segments
