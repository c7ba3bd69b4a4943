"""A plan as a picture: what is compiled, what a request has of it, the mask, the blocks."""

import hashlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import count, groupby, islice
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from picbench.engines.algorithms import Algorithm, Reuse, stand_ins
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.policy import Segment
from picbench.errors import ConfigError
from picbench.figures.canvas import COLUMN, drawing
from picbench.figures.picture import (
    PicturedBlock,
    PicturedToken,
    PlanPicture,
    Sight,
    TokenGroup,
    TokenRole,
)
from picbench.files import write_whole

#: From Okabe and Ito's palette; apart for any kind of colour vision.
_COLOURS = {
    TokenRole.TEXT: "#56B4E9",
    TokenRole.LINKED: "#D55E00",
    TokenRole.SHARED: "#004C80",
    TokenRole.COPIED: "#CC79A7",
    TokenRole.ADDED: "#F0E442",
}
_COMPILED, _HIDDEN = "#333333", "#FFFFFF"
_INDEX = {role: 1 + n for n, role in enumerate(_COLOURS)}
_ONLY_COMPILED = 1 + len(_COLOURS)

_BLOCKS_A_LINE = 6
_DPI = 220
_SIDE = 2.55
_LINE = 0.13
_FONT = 6.5


def fingerprint(picture: PlanPicture) -> str:
    """A hash of all that a picture shows; it is in the description of the file."""
    return hashlib.sha256(repr(picture).encode()).hexdigest()[:16]


def draw_plan(picture: PlanPicture, title: str, path: Path) -> None:
    """Write a PNG, 85 mm wide. Raises ConfigError for another kind of file."""
    if path.suffix != ".png":
        raise ConfigError(f"`output={path}` is no PNG", hint="let the name end in .png")
    lines = _block_lines(picture)
    heights = [2 * _LINE, _SIDE, len(lines) * _LINE]
    settings = {"font.size": _FONT, "axes.grid": False, "axes.labelpad": 2}
    with drawing(COLUMN, sum(heights) + 1.03, **settings) as figure:
        strips, mask, blocks = figure.subplots(3, height_ratios=heights)
        figure.suptitle(title, x=0.02, ha="left", weight="bold", fontsize=_FONT)
        _draw_strips(strips, picture)
        _draw_mask(mask, picture)
        _draw_blocks(blocks, lines)
        _draw_legend(figure, picture)
        # Every token has a pixel.
        dpi = max(_DPI, ceil((picture.anchor + len(picture.tokens)) / _SIDE))
        note = {"Description": f"{title}; {fingerprint(picture)}"}
        drawn = BytesIO()
        figure.savefig(drawn, dpi=dpi, format="png", metadata=note, pil_kwargs={"optimize": True})
        write_whole(path, drawn.getvalue())


def _show(axis: Any, rows: list[list[int]], width: int, height: float) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([_HIDDEN, *_COLOURS.values(), _COMPILED])
    shape = {"aspect": "auto", "interpolation": "nearest", "extent": (0, width, height, 0)}
    axis.imshow(rows, cmap=colours, vmin=-0.5, vmax=_ONLY_COMPILED + 0.5, **shape)
    axis.tick_params(length=0, pad=2)


def _draw_strips(axis: Any, picture: PlanPicture) -> None:
    """Two lines over the mask's keys: what compiles compute, what the request has."""
    above = [_ONLY_COMPILED] * picture.anchor
    for token in picture.tokens:
        compiled = _ONLY_COMPILED if picture.segments[token.segment].compiled else 0
        above.append(compiled if token.planned.compiled is None else _INDEX[token.role])
    below = [0] * picture.anchor + [_INDEX[token.role] for token in picture.tokens]
    _show(axis, [above, below], len(below), 2)
    axis.axhline(1, color="white", lw=1)
    for _, first, _ in _bounds(picture, picture.anchor):
        axis.axvline(first, color="white", lw=1)
    axis.set_yticks([0.5, 1.5], ["compiled", "request"])
    _label_keys(axis, picture)


def _draw_mask(axis: Any, picture: PlanPicture) -> None:
    """A line for each query, a column for each key, in the colour of the key's KV."""
    roles = [0] * picture.anchor + [_INDEX[token.role] for token in picture.tokens]
    rows = [
        [_cell(Sight(sight), role) for sight, role in zip(line, roles, strict=True)]
        for line in picture.mask
    ]
    _show(axis, rows, len(roles), len(rows))
    axis.set_xticks([])
    bounds = _bounds(picture, 0)
    ticks = _apart(bounds, len(rows))
    axis.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    for _, first, _ in bounds[1:]:
        axis.axhline(first, color="black", lw=0.25)
    for _, first, _ in _bounds(picture, picture.anchor)[0 if picture.anchor else 1 :]:
        axis.axvline(first, color="black", lw=0.25)
    axis.set_xlabel("keys: columns. queries: rows")
    axis.spines[:].set(visible=True, linewidth=0.5)


def _cell(sight: Sight, role: int) -> int:
    if sight is Sight.NONE:
        return 0
    return role if sight is Sight.SEEN else _ONLY_COMPILED


def _bounds(picture: PlanPicture, start: int) -> list[tuple[str, int, int]]:
    """(name, first index, index after the last) of each segment's tokens."""
    found, at = [], start
    for index, segment in enumerate(picture.segments):
        count = sum(token.segment == index for token in picture.tokens)
        found.append((segment.name, at, at + count))
        at += count
    return found


def _apart(bounds: list[tuple[str, int, int]], rows: int) -> list[tuple[float, str]]:
    """Labels of segments in their middles; of two that would touch, that of the longer one."""
    placed: list[tuple[float, str]] = []
    for name, first, last in sorted(bounds, key=lambda bound: bound[1] - bound[2]):
        middle = (first + last) / 2
        if all(abs(middle - other) * _SIDE / rows > 0.085 for other, _ in placed):
            placed.append((middle, name))
    return placed


def _label_keys(axis: Any, picture: PlanPicture) -> None:
    """Names of segments where there is room for them; numbers of chunks where there is less."""
    keys = picture.anchor + len(picture.tokens)
    ticks = []
    bounds = _bounds(picture, picture.anchor)
    for name, first, last in [("anchor", 0, picture.anchor), *bounds]:
        room = (last - first) / keys * _SIDE
        for label in (name, name.split()[-1] if " " in name else ""):
            if label and 0.055 * len(label) + 0.02 <= room:
                ticks.append(((first + last) / 2, label))
                break
    axis.xaxis.tick_top()
    axis.set_xticks([at for at, _ in ticks], [label for _, label in ticks])
    axis.spines[:].set_visible(False)


def _block_lines(picture: PlanPicture) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Lines of blocks, a new one for each kind: the kind where it begins, and slots of blocks."""
    lines = []
    for kind in ("shared", "copied", "computed"):
        found = [
            tuple(0 if token is None else _INDEX[token.role] for token in block.slots)
            for block in picture.blocks_of(kind)
        ]
        for first in range(0, len(found), _BLOCKS_A_LINE):
            lines.append(("" if first else kind, found[first : first + _BLOCKS_A_LINE]))
    return lines


def _draw_blocks(axis: Any, lines: list[tuple[str, list[tuple[int, ...]]]]) -> None:
    from matplotlib.patches import Rectangle

    colours = [_HIDDEN, *_COLOURS.values()]
    size = max(len(block) for _, blocks in lines for block in blocks)
    for line, (_, blocks) in enumerate(lines):
        for number, block in enumerate(blocks):
            left = number * (size + 2)
            for slot, role in enumerate(block):
                place = (left + slot, line + 0.15)
                axis.add_patch(Rectangle(place, 1, 0.7, color=colours[role], lw=0))
            place = (left, line + 0.15)
            axis.add_patch(Rectangle(place, size, 0.7, fill=False, ec="black", lw=0.4))
    axis.set_xlim(-0.5, _BLOCKS_A_LINE * (size + 2) - 1.5)
    axis.set_ylim(len(lines), 0)
    axis.set_xticks([])
    axis.set_yticks([i + 0.5 for i in range(len(lines))], [name for name, _ in lines])
    axis.tick_params(length=0, pad=2)
    axis.set_xlabel("KV blocks in compute order; white: not seen or free")
    axis.spines[:].set_visible(False)


def _draw_legend(figure: Any, picture: PlanPicture) -> None:
    from matplotlib.patches import Patch

    used = {token.role for token in picture.tokens}
    names = {role: str(role) for role in used}
    if picture.picked:
        names[TokenRole.LINKED] = "linked (example)"
    handles = [Patch(color=c, label=names[role]) for role, c in _COLOURS.items() if role in used]
    if picture.anchor or any(Sight.REPLACED in line for line in picture.mask):
        handles.append(Patch(color=_COMPILED, label="only its compile has it"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=2 if len(handles) == 4 else 3,
        fontsize=_FONT - 0.5,
        handlelength=1,
        columnspacing=1,
        borderaxespad=0.2,
    )


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
    anchors = stand_ins(algorithm.anchor_text)
    layout = algorithm.layout(pad_token=_PAD, bos_token=_BOS, anchors=anchors)
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
            line.append(f"{_block_cell(picture.sights(group, columns)):>{width}}")
        yield line


def _label(picture: PlanPicture, group: TokenGroup) -> str:
    tokens = [picture.tokens[key - picture.anchor] for key in group.keys]
    places = _range([token.planned.position for token in tokens])
    width = max(len(segment.name) for segment in picture.segments)
    return f"{group.name:{width}}  {places:>9}  {group.role}"


def _block_cell(sights: set[Sight]) -> str:
    if sights == {Sight.NONE}:
        return "·"
    hidden = bool(sights & {Sight.REPLACED, Sight.ANCHOR})
    if Sight.NONE in sights:
        return "◺" if hidden else "◣"
    return "□" if hidden else "■"
