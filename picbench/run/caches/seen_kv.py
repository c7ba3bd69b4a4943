"""How many tokens of a prompt have KV that other prompts left: what a run expects of its caches."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from picbench.engines.algorithms import Reuse
from picbench.workloads.sample import Sample, SampleSegment

_Tokens = tuple[int, ...]

#: A chunk in another document is another chunk, as in `WorkloadFacts`.
_Chunk = tuple[_Tokens, _Tokens]


class SeenKv:
    """The KV that prompts leave in a cache which never evicts anything.

    An arm that reuses chunks finds those that it had before, one that reuses prefixes the whole
    blocks of `block` tokens that some earlier prompt began with.
    """

    def __init__(self, reuse: Reuse, block: int) -> None:
        self._reuse = reuse
        self._block = block
        self._chunks: set[_Chunk] = set()
        self._prefixes: set[int] = set()

    def add(self, sample: Sample) -> None:
        """Note a prompt that was served."""
        if self._reuse is Reuse.CHUNKS:
            self._chunks.update(map(_content, sample.chunks))
        elif self._reuse is Reuse.PREFIX:
            self._prefixes.update(self._blocks(sample.tokens))

    def find(self, sample: Sample) -> int:
        """Tokens of a prompt that the cache has, or has as soon as it is computed once.

        The second kind are chunks that the prompt itself repeats. An engine always computes a
        prompt's last token, so that a prefix ends before it.
        """
        if self._reuse is Reuse.CHUNKS:
            return self._find_chunks(sample)
        if self._reuse is Reuse.PREFIX:
            return self._find_prefix(sample)
        return 0

    def _find_chunks(self, sample: Sample) -> int:
        here: set[_Chunk] = set()
        found = 0
        for chunk in map(_content, sample.chunks):
            if chunk in self._chunks or chunk in here:
                found += len(chunk[1])
            here.add(chunk)
        return found

    def _find_prefix(self, sample: Sample) -> int:
        found = 0
        for prefix in self._blocks(sample.tokens[:-1]):
            if prefix not in self._prefixes:
                break
            found += self._block
        return found

    def _blocks(self, tokens: _Tokens) -> Iterator[int]:
        """A hash of each beginning of whole blocks, the shortest first."""
        prefix = 0
        for end in range(self._block, len(tokens) + 1, self._block):
            prefix = hash((prefix, tokens[end - self._block : end]))
            yield prefix


def count_shared(samples: Sequence[Sample], reuse: Reuse) -> list[int]:
    """Tokens of each prompt that it can at most have from others that are served at the same time.

    These are the beginning that it has in common with another one and, where chunks are reused,
    what its chunks have in common with those of the others from their beginnings on, and chunks
    that it repeats. The order in which an engine serves them is not known, so that all count.
    """
    if reuse is Reuse.NOTHING:
        return [0] * len(samples)
    prompts = _Beginnings([sample.tokens for sample in samples])
    shared = [prompts.longest(sample.tokens) for sample in samples]
    if reuse is Reuse.PREFIX:
        return shared
    # A chunk that only its own prompt repeats is computed there once.
    beginnings = _Beginnings([tokens for sample in samples for tokens in _distinct(sample)])
    return [
        _count_in_chunks(sample, lead, beginnings)
        for sample, lead in zip(samples, shared, strict=True)
    ]


def _distinct(sample: Sample) -> set[_Tokens]:
    return {chunk.tokens for chunk in sample.chunks}


def _count_in_chunks(sample: Sample, lead: int, beginnings: "_Beginnings") -> int:
    """Tokens of a prompt in its first `lead`, or in chunks at places that others have as well."""
    here: set[_Tokens] = set()
    start = total = 0
    for segment in sample.segments:
        tokens = segment.tokens
        found = max(0, min(lead - start, len(tokens)))
        if segment.kind == "chunk":
            known = len(tokens) if tokens in here else beginnings.longest(tokens)
            found = max(found, known)
            here.add(tokens)
        start += len(tokens)
        total += found
    return total


class _Beginnings:
    """Finds what sequences have in common with others from their beginnings on."""

    def __init__(self, sequences: Sequence[_Tokens]) -> None:
        self._times = Counter(sequences)
        self._sorted = sorted(self._times)

    def longest(self, tokens: _Tokens) -> int:
        """The longest beginning in common with another one of the sequences.

        That is all of it where the sequence is there more than once. Of the others, those next to
        it in sorted order have most in common with it.
        """
        if self._times[tokens] > 1:
            return len(tokens)
        place = bisect_left(self._sorted, tokens)
        near = (*self._sorted[max(0, place - 1) : place], *self._sorted[place + 1 : place + 2])
        return max((_in_common(tokens, other) for other in near), default=0)


def _in_common(first: _Tokens, second: _Tokens) -> int:
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def _content(chunk: SampleSegment) -> _Chunk:
    return chunk.context, chunk.tokens
