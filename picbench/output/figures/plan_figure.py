"""A plan as a picture: what is compiled, what a request has of it, the mask, the blocks."""

import hashlib
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any

from picbench.engines.planning.picture import PlanPicture, Sight, TokenRole
from picbench.errors import ConfigError
from picbench.output.figures.style import drawing
from picbench.whole_files import write_whole

#: Inches: 85 mm, a column of a paper.
COLUMN = 85 / 25.4

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
_PALETTE_SIZE = 64
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
    height = _SIDE + (2 + len(lines)) * _LINE + 1.03
    with drawing():
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"font.size": _FONT, "axes.grid": False}):
            figure = Figure(figsize=(COLUMN, height))
            left = (COLUMN - _SIDE - 0.08) / COLUMN
            wide, at = _SIDE / COLUMN, height - 0.3
            at -= 2 * _LINE
            strips = figure.add_axes((left, at / height, wide, 2 * _LINE / height))
            at -= _SIDE + 0.05
            mask = figure.add_axes((left, at / height, wide, _SIDE / height))
            at -= 0.2 + len(lines) * _LINE
            blocks = figure.add_axes((left, at / height, wide, len(lines) * _LINE / height))
            figure.text(0.02, 1 - 0.1 / height, title, va="center", weight="bold")
            _draw_strips(strips, picture)
            _draw_mask(mask, picture)
            _draw_blocks(blocks, lines)
            _draw_legend(figure, picture)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Every token has a pixel.
            keys = picture.anchor + len(picture.tokens)
            dpi = max(_DPI, ceil(keys / _SIDE))
            _save(figure, dpi, f"{title}; {fingerprint(picture)}", path)


def _save(figure: Any, dpi: int, note: str, path: Path) -> None:
    """Write a figure of few colours as a PNG with a palette, a third of the size."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn, kept = BytesIO(), BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    info = PngInfo()
    info.add_text("Description", note)
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(_PALETTE_SIZE)
    few.save(kept, format="PNG", optimize=True, pnginfo=info)
    write_whole(path, kept.getvalue())


def _show(axis: Any, rows: list[list[int]], width: int, height: float) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([_HIDDEN, *_COLOURS.values(), _COMPILED])
    axis.imshow(
        rows,
        cmap=colours,
        vmin=-0.5,
        vmax=_ONLY_COMPILED + 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(0, width, height, 0),
    )
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
    axis.set_xlabel("keys: columns. queries: rows", labelpad=2)
    for spine in axis.spines.values():
        spine.set(visible=True, linewidth=0.5)


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
    for spine in axis.spines.values():
        spine.set_visible(False)


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
    axis.set_xlabel("KV blocks in compute order; white: not seen or free", labelpad=2)
    for spine in axis.spines.values():
        spine.set_visible(False)


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
        loc="lower center",
        ncols=2 if len(handles) == 4 else 3,
        fontsize=_FONT - 0.5,
        handlelength=1,
        columnspacing=1,
        borderaxespad=0.2,
    )
