"""How figures look, and how they are written: matplotlib on constrained layout."""

import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from picbench.engines.ledger import KINDS
from picbench.errors import ConfigError
from picbench.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

#: Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

#: One more than colours, so that a colour that comes again has another marker.
MARKERS = "osD^vPXh*"

#: Lines of the arms that have a palette's colours for the first, second, ... time.
_LINES = ("-", "--", ":", "-.")

#: Inches: a figure of a run, and a column of a paper.
WIDTH, COLUMN = 9.0, 85 / 25.4

#: Points in papers: letters of labels in the plot, and of the note. Less than 6 cannot be read.
LABEL, NOTE = 6.2, 6.0

#: Letters of a line of a paper's note, of its legend, and what a name of that has beside letters.
_NOTE_LETTERS, _LEGEND_LETTERS, _BESIDE = 69, 66, 5

#: Inches: a line of the note, a line of the legend, axes and labels below a plot.
_LINE, _LEGEND_LINE, _BELOW = 0.098, 0.12, 0.46

#: Most numbers on a logarithmic axis of a paper.
_MOST_NUMBERS = 8

FORMATS = ("png", "pdf", "svg")

#: Style sheets: `all`, and for papers also `printed`.
_STYLES = Path(__file__).with_name("styles")


@dataclass(frozen=True, slots=True)
class Panel:
    """What a panel says: its axes, whether they are logarithmic, and the note."""

    x_label: str
    y_label: str
    note: str
    log_x: bool = False
    log_y: bool = False


def arm_styles(arms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) of each arm, the same in every figure with the same arms."""
    return {
        arm: (PALETTE[n % len(PALETTE)], MARKERS[n % len(MARKERS)]) for n, arm in enumerate(arms)
    }


def line_style(place: int) -> str:
    """The line of the arm at `place`, from 0: colours come again, with other lines."""
    return _LINES[place // len(PALETTE) % len(_LINES)]


def kind_colours() -> Mapping[str, str]:
    """The colour of each kind of block."""
    greys = {"free": "#FFFFFF", "prefix_idle": "#DDDDDD", "chunk_idle": "#BBBBBB"}
    held = [kind for kind in KINDS if kind not in greys]
    return greys | dict(zip(held, PALETTE, strict=False))


@contextmanager
def drawing(
    width: float = WIDTH, height: float = 4.0, *styles: str, **settings: Any
) -> Iterator["Figure"]:
    """A figure of so many inches. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "figures need matplotlib, which is not installed", hint="pip install matplotlib"
        ) from error
    chosen: dict[Any, Any] = {}
    for path in (_STYLES / f"{name}.mplstyle" for name in ("all", *styles)):
        chosen |= matplotlib.rc_params_from_file(path, use_default_template=False)
    with matplotlib.rc_context(chosen | settings), warnings.catch_warnings():
        # Captions have names of folders, in any script; what a font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield Figure(figsize=(width, height), layout="constrained")


def write(figure: "Figure", note: str, base: Path) -> None:
    """Put the note below the figure and write ``base.svg`` and ``base.png``."""
    _put_note(figure, note, 7)
    _save(figure, note, base, ("svg", "png"), 150)


def _put_note(figure: "Figure", note: str, letters: float, width: int = 0) -> None:
    """Lines of the note have `width` letters, or as many as the figure has room for."""
    # Dollars in names of folders begin no formula; `parse_math` is not for text that is wrapped.
    text = (textwrap.fill(note, width) if width else note).replace("$", r"\$")
    style = {"fontsize": letters, "x": 0.012, "ha": "left", "va": "bottom", "color": "#444444"}
    figure.supxlabel(text, wrap=not width, **style)


def _save(figure: "Figure", note: str, base: Path, formats: Sequence[str], dpi: int) -> None:
    """Write the figure in some formats, each whole."""
    # Formats differ in their dots an inch, and the layout in nothing.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Description": note},
        "pdf": {"Subject": note, "CreationDate": None},
        "svg": {"Description": note, "Date": None},
    }
    for kind in formats:
        drawn = BytesIO()
        figure.savefig(drawn, format=kind, dpi=dpi, metadata=metadata[kind])
        write_whole(base.with_name(f"{base.name}.{kind}"), drawn.getvalue())


@contextmanager
def canvas(
    panel: Panel, base: Path, plot: float = 1.55, *, legend: Collection[str] = (), ticks: int = 1
) -> Iterator["Figure"]:
    """A figure as papers print it: a column wide, with a note of what was measured below it.

    Its axes are about `plot` inches high; `legend` has the names that `draw_legend` will be given,
    `ticks` is how many lines the labels of ticks have. Writes ``base.png``, ``base.pdf`` and
    ``base.svg`` when the block ends.
    """
    lines = len(textwrap.wrap(panel.note, _NOTE_LETTERS))
    above = _LEGEND_LINE * -(-len(legend) // _columns(legend)) if legend else 0.0
    height = plot + _BELOW + _LINE * (lines + ticks - 1) + above
    with drawing(COLUMN, height, "printed") as figure:
        # Labels of points are placed in a layout that is final, so that the note comes first.
        _put_note(figure, panel.note, NOTE, _NOTE_LETTERS)
        yield figure
        _save(figure, panel.note, base, FORMATS, 300)


def scale(axis: "Axes", panel: Panel) -> None:
    """Names, and logarithmic scales with plain numbers."""
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    if panel.log_x:
        axis.set_xscale("log")
        log_numbers(axis.xaxis, most=_MOST_NUMBERS)
    if panel.log_y:
        axis.set_yscale("log")
        log_numbers(axis.yaxis, most=_MOST_NUMBERS)


def log_numbers(axis: "Axis", most: int = 20) -> None:
    """Plain numbers at 1, 2 and 5 of a logarithmic axis, or only at 1 if those are too many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    many = 3 * log10(high / low) > most
    axis.set_major_locator(LogLocator(subs=(1.0,) if many else log_steps(low, high)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def log_steps(low: float, high: float) -> tuple[float, ...]:
    """Multiples of powers of ten to name on a logarithmic axis: two names at least make a scale."""
    steps = (1.0, 2.0, 5.0)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    named = [step for power in powers for step in steps if low <= step * 10.0**power <= high]
    return steps if len(named) > 1 else tuple(map(float, range(1, 10)))


def draw_legend(figure: "Figure", handles: Sequence[Any], names: Sequence[str]) -> None:
    """Put the legend above the panels, in the middle."""
    figure.legend(
        handles,
        names,
        loc="outside upper center",
        ncols=_columns(names),
        fontsize=LABEL,
        handletextpad=0.4,
        columnspacing=1.0,
        labelspacing=0.25,
        borderpad=0.1,
        handlelength=1.2,
    )


def _columns(names: Collection[str]) -> int:
    """The most columns, of four at most, that are no wider than the figure."""
    for count in range(min(4, len(names)), 1, -1):
        filled = np.array_split(list(names), count)
        if sum(max(map(len, column)) + _BESIDE for column in filled) <= _LEGEND_LETTERS:
            return count
    return 1


def label_points(
    axis: "Axes",
    points: Sequence[tuple[str, float, float, str]],
    drawn: Iterable[tuple[float, float]] = (),
) -> None:
    """Write names next to points, (name, x, y, colour) each, where they cover nothing.

    Points without a name and `drawn`, places of other ink, are kept free. Needs final limits and
    all that is beside the axes, because the layout stays as it is from here on.
    """
    from adjustText import adjust_text  # type: ignore[import-untyped]
    from matplotlib.patheffects import withStroke

    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    # White around letters keeps them readable on lines and bars.
    style: Any = {"fontsize": NOTE, "path_effects": [withStroke(linewidth=1.4, foreground="white")]}
    texts = [
        axis.text(x, y, name, color=colour, zorder=5, **style)
        for name, x, y, colour in points
        if name
    ]
    if texts:
        xs, ys = zip(*((x, y) for _, x, y, _ in points), *drawn, strict=True)
        arrow = {"arrowstyle": "-", "lw": 0.4, "color": "#444444"}
        # Steps, not seconds, end the search: the same data give the same figure on any machine.
        adjust_text(texts, xs, ys, ax=axis, expand=(1.1, 1.3), arrowprops=arrow, iter_lim=300)
