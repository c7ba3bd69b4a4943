"""How figures look, and how they are written."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.engines.ledger import KINDS
from picbench.errors import ConfigError
from picbench.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Okabe and Ito's palette, which readers with any kind of colour vision can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

#: One more than colours, so that a colour that comes again has another marker.
MARKERS = "osD^vPXh*"

#: Lines of the arms that have a palette's colours for the first, second, ... time.
LINES = ("-", "--", ":", "-.")

#: Inches.
WIDTH = 9.0

_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "picbench",
    "svg.fonttype": "none",
}


def arm_styles(arms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(colour, marker) of each arm, the same in every figure with the same arms."""
    return {
        arm: (PALETTE[n % len(PALETTE)], MARKERS[n % len(MARKERS)]) for n, arm in enumerate(arms)
    }


def line_style(place: int) -> str:
    """The line of the arm at `place`, from 0: colours come again, with other lines."""
    return LINES[place // len(PALETTE) % len(LINES)]


def log_steps(low: float, high: float) -> tuple[float, ...]:
    """Multiples of powers of ten to name on a logarithmic axis: two names at least make a scale."""
    steps = (1.0, 2.0, 5.0)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    named = [step for power in powers for step in steps if low <= step * 10.0**power <= high]
    return steps if len(named) > 1 else tuple(map(float, range(1, 10)))


def kind_colours() -> Mapping[str, str]:
    """The colour of each kind of block."""
    greys = {"free": "#FFFFFF", "prefix_idle": "#DDDDDD", "chunk_idle": "#BBBBBB"}
    held = [kind for kind in KINDS if kind not in greys]
    return greys | dict(zip(held, PALETTE, strict=False))


@contextmanager
def drawing() -> Iterator[None]:
    """Draw inside this block; ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            "figures need matplotlib, which is not installed", hint="pip install matplotlib"
        ) from error
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Captions have names of folders, in any script; what a font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def write(figure: "Figure", caption: str, base: Path) -> None:
    """Put the caption below the figure and write ``base.svg`` and ``base.png``."""
    # Dollars in names of folders begin no formula; `parse_math` is not for text that is wrapped.
    text = caption.replace("$", r"\$")
    figure.supxlabel(text, fontsize=7, wrap=True, x=0.01, ha="left", va="bottom")
    base.parent.mkdir(parents=True, exist_ok=True)
    save(figure, base, "svg", metadata={"Date": None, "Description": caption})
    save(figure, base, "png", dpi=150, metadata={"Description": caption})


def save(figure: "Figure", base: Path, kind: str, **settings: Any) -> None:
    """Write ``base.kind`` whole or not at all; `settings` are those of matplotlib's `savefig`."""
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, **settings)
    write_whole(base.with_name(f"{base.name}.{kind}"), drawn.getvalue())
