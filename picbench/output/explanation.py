"""An algorithm's plan of an example prompt, as text."""

from collections.abc import Iterator, Sequence
from itertools import count, groupby, islice

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from picbench.engines.algorithms import Algorithm, Reuse
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.picture import (
    PicturedBlock,
    PicturedToken,
    PlanPicture,
    Sight,
    TokenGroup,
    TokenRole,
)
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.errors import ConfigError

#: Tokens of the example's text before its chunks, of its question, and of what stands before each
#: chunk in its document, which only ``context=document`` looks at.
TEXT, QUESTION, DOCUMENT = 20, 10, 12

#: A picture has a cell for each pair of tokens.
LARGEST = 2000

#: The example's token ids: added tokens, then those of the user from _FIRST on.
_PAD, _BOS, _FIRST = 0, 1, 1000

_LETTERS = {role: role[0] for role in TokenRole} | {TokenRole.ADDED: "+"}
_STYLES = {
    TokenRole.TEXT: "cyan",
    TokenRole.LINKED: "red",
    TokenRole.SHARED: "blue",
    TokenRole.COPIED: "magenta",
    TokenRole.ADDED: "yellow",
}


def example_picture(algorithm: Algorithm, chunks: int, tokens: int) -> PlanPicture:
    """The plan of a text, chunks of `tokens` tokens each, and a question, in blocks of 16.

    Raises ConfigError for sizes that no picture has room for, and for an algorithm that does not
    serve such a prompt.
    """
    for field, value in (("chunks", chunks), ("tokens", tokens)):
        if value < 1:
            raise ConfigError(f"`{field}={value}` is too few", hint="give at least 1")
    if chunks * tokens > LARGEST:
        raise ConfigError(
            f"a picture of {chunks} chunks of {tokens} tokens has no room",
            hint=f"lower `chunks` or `tokens` to {LARGEST} chunk tokens",
        )
    layout = LayoutConfig(
        BLOCK_SIZE,
        pad=algorithm.pads,
        pad_token=_PAD,
        bos_token=_BOS,
        documents=algorithm.documents,
    )
    try:
        arranged = algorithm.arrange(list(_prompt(chunks, tokens)), layout)
        return PlanPicture.of(arranged, algorithm.plan_chunk, layout)
    except ValueError as error:
        raise ConfigError(f"{algorithm.spec}: {error}", hint="use another algorithm") from error


def _prompt(chunks: int, tokens: int) -> Iterator[Segment]:
    ids = count(_FIRST)
    yield Segment(tuple(islice(ids, TEXT)))
    for _ in range(chunks):
        context = tuple(islice(ids, DOCUMENT))
        yield Segment(tuple(islice(ids, tokens)), chunk=True, context=context)
    yield Segment(tuple(islice(ids, QUESTION)))


def explain(algorithm: Algorithm, picture: PlanPicture) -> Iterator[RenderableType]:
    """Segments, blocks and mask of a plan, line by line."""
    yield f"{algorithm.spec}: {algorithm.summary}\n"
    yield _segments(picture)
    yield ""
    yield from cost(algorithm, picture)
    yield ""
    yield from _blocks(picture)
    yield ""
    yield from _mask(picture)


def cost(algorithm: Algorithm, picture: PlanPicture) -> Iterator[str]:
    """What is done once, and what each request costs."""
    compiled = [segment.compiled for segment in picture.segments if segment.compiled]
    blocks = sum(-(-count // BLOCK_SIZE) for count in compiled)
    before = f", each after {picture.anchor} that are discarded" if picture.anchor else ""
    if compiled:
        yield f"once: compiles {sum(compiled)} tokens, {blocks} blocks{before}"
    else:
        yield "once: compiles nothing"
    shared, copied = picture.blocks_of("shared"), picture.blocks_of("copied")
    own = picture.blocks_of("computed")
    found = 0 if algorithm.reuse is Reuse.NOTHING else sum(block.keyed for block in own)
    yield (
        f"each request: computes {picture.computed} of {len(picture.tokens)} tokens, "
        f"maps {len(shared)} shared blocks, copies {len(copied)}, computes {len(own)}"
    )
    yield f"computed blocks that an equal prefix finds again: {found}"
    if picture.picked:
        yield (
            f"{picture.picked} tokens are picked for each request before it runs; "
            "those shown are an example"
        )


def _segments(picture: PlanPicture) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("segment")
    columns = ("positions", "compiled", "masked pads", *TokenRole)
    for column in columns:
        table.add_column(column, justify="right")
    for index, segment in enumerate(picture.segments):
        roles = [picture.count(role, index) for role in TokenRole]
        counts = [segment.compiled, segment.fill, *roles]
        places = f"{segment.start}-{segment.end - 1}"
        table.add_row(segment.name, places, *(str(value or "-") for value in counts))
    return table


def _blocks(picture: PlanPicture) -> Iterator[Text]:
    letters = ", ".join(f"{_LETTERS[role]} {role}" for role in TokenRole)
    yield Text(f"Blocks in compute order, a letter a slot: {letters}, . not seen")
    for index, block in enumerate(picture.blocks):
        line = Text(f"{index:4}  {block.kind:8}  ")
        for token in block.slots:
            line.append(*(".", "dim") if token is None else _letter(token))
        line.append(" " * (BLOCK_SIZE - len(block.slots) + 2) + ", ".join(_places(picture, block)))
        yield line


def _letter(token: PicturedToken) -> tuple[str, str]:
    return _LETTERS[token.role], _STYLES[token.role]


def _places(picture: PlanPicture, block: PicturedBlock) -> Iterator[str]:
    """The segments in a block, with the positions of each."""
    seen = [token for token in block.slots if token is not None]
    for segment, run in groupby(seen, lambda token: token.segment):
        positions = [token.planned.position for token in run]
        yield f"{picture.segments[segment].name} {_range(positions)}"


def _range(positions: Sequence[int]) -> str:
    first, last = positions[0], positions[-1]
    if first == last:
        return str(first)
    whole = last - first + 1 == len(positions)
    return f"{first}-{last}" if whole else f"{len(positions)} of {first}-{last}"


def _mask(picture: PlanPicture) -> Iterator[Text]:
    yield Text("What a row's tokens see of a column's: ■ all, ◣ those up to themselves, · nothing;")
    yield Text("□ ◺ the same of KV that only their chunk saw: an anchor, or tokens before linking")
    groups = picture.groups()
    keys = [group.keys for group in groups]
    numbers = list(range(1, len(groups) + 1))
    if picture.anchor:
        keys, numbers = [tuple(range(picture.anchor)), *keys], [0, *numbers]
    width = len(str(len(groups))) + 1
    labels = [_label(picture, group) for group in groups]
    margin = max(map(len, labels)) + width + 1
    yield Text(" " * margin + "".join(f"{number:{width}}" for number in numbers))
    if picture.anchor:
        yield Text(f"{0:{width}} anchor: {picture.anchor} tokens before each chunk's compile")
    for number, group, label in zip(range(1, len(groups) + 1), groups, labels, strict=True):
        line = Text(f"{number:{width}} {label}".ljust(margin))
        for columns in keys:
            line.append(f"{_cell(picture.sights(group, columns)):>{width}}")
        yield line


def _label(picture: PlanPicture, group: TokenGroup) -> str:
    tokens = [picture.tokens[key - picture.anchor] for key in group.keys]
    places = _range([token.planned.position for token in tokens])
    width = max(len(segment.name) for segment in picture.segments)
    return f"{group.name:{width}}  {places:>9}  {group.role}"


def _cell(sights: set[Sight]) -> str:
    if sights == {Sight.NONE}:
        return "·"
    hidden = bool(sights & {Sight.REPLACED, Sight.ANCHOR})
    if Sight.NONE in sights:
        return "◺" if hidden else "◣"
    return "□" if hidden else "■"
