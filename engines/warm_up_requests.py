"""The requests that an engine serves before any that is measured."""

from collections.abc import Iterator

from picbench.engines.request import Chunk, Request, Text

#: Tokens of the longest prompt, and of its chunks.
_LONGEST, _LARGE = 32_000, 500

#: Tokens after the chunks, and the chunks of prompts with few and many linked tokens: how many, and
#: tokens of each.
_TAIL = 40
_FEW, _MANY = (1, 700), (12, 50)


def warm_up_requests(longest: int, device: str, *, chunks: bool) -> Iterator[Request]:
    """Requests that use each kernel; each is to be served twice, cold and warm.

    Kernels are compiled when they are first used: those for plain requests and, with `chunks`, for
    compiling chunks and for linking few and many tokens. Prompts of more than `longest` tokens are
    left out: the engine will never serve any like them. On a GPU there is also a long one, because
    the first large steps of engines with chunks took 165 ms more than later ones (H200, 8B shape,
    8,192 tokens in 17 chunks), though all kernels were compiled.
    """
    tail = min(_TAIL, longest)
    yield Request([Text(tokens=(1,) * tail)])
    shapes = [_FEW, _MANY] if chunks else []
    if device == "cuda":
        shapes.append((min(longest - tail, _LONGEST) // _LARGE, _LARGE))
    for count, length in shapes:
        if 0 < count * length <= longest - tail:
            documents = [Chunk(tokens=(i + 1,) * length) for i in range(count)]
            yield Request([*documents, Text(tokens=(1,) * tail)])
