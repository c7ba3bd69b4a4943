"""A grid of measured cells: the format of `grid.json`, of which the package has copies.

A cell is traffic of one kind, served by every arm: how much of it recurs, how many chunks of which
length, drawn from how many, how requests come, and what was served before. Repeats differ in their
seed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from picbench.engines.algorithms import Algorithm, Registry, Reuse
from picbench.errors import ConfigError, first_refusal
from picbench.files import write_json

#: How requests come: one at a time, or as many at a time as the grid says; else requests a second.
ALONE, BURST = "alone", "burst"

#: The least share of requests on a quiet core that leaves their median alone.
QUIET = 0.9

SCHEMA = 3

#: Files without the sizes of graphs are read, too.
_READ = (2, SCHEMA)

#: CUDA graphs of engines whose files do not say: vLLM's choice for engines of 64 requests.
_UNRECORDED = 128

#: The grids that come with the package.
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GridPoint:
    """What is served in a cell.

    `reuse` is the share of chunk tokens in chunks of a corpus of `corpus` chunks; all others occur
    once. `chunks` of `chunk_tokens` each are in a prompt. `load` is `ALONE`, `BURST`, or requests a
    second, `output` the number of generated tokens. A `warm` cache has served each chunk of the
    corpus that is needed, as the first of a prompt, and as many requests of the same kind.
    """

    reuse: float
    chunks: int
    chunk_tokens: int
    corpus: int
    load: str
    output: int
    cache: Literal["cold", "warm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCell:
    """What one arm took in a cell: means over its requests, except where another is named.

    `ttft_s` is the median from arrival to the first token, `ttft_p95_s` the 95th percentile.
    `requests_s` are answered requests over the time from the first arrival to the last token.
    `peak_blocks` were held by running requests at a time, at most. `computed` prompt tokens were
    computed, `compiled` ones for chunks among them. `middle` has both numbers of the request in the
    middle, in order of computed tokens: those that the median TTFT is of. `quiet` is the share of
    requests alone, or of bursts, that began on a core that nothing else used. None is not known.
    """

    requests: int
    ttft_s: float
    ttft_p95_s: float
    requests_s: float
    peak_blocks: float
    prompt: float
    computed: float
    output: float
    compiled: float | None = None
    middle: tuple[float, float] | None = None
    quiet: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A point, the seed of its traffic, and what each arm took; `seconds` are those of them all."""

    point: GridPoint
    seed: int
    arms: Mapping[str, ArmCell]
    seconds: float = 0.0

    @property
    def quiet(self) -> float:
        """The share of requests on a quiet core, of the arm with the fewest; 1 if none says."""
        return min(1.0 if arm.quiet is None else arm.quiet for arm in self.arms.values())

    @property
    def disturbed(self) -> bool:
        """Whether any arm's times may be of something else that the host did.

        Only those of requests alone: bursts hardly wait for the host.
        """
        return self.point.load == ALONE and self.quiet < QUIET


@dataclass(frozen=True, slots=True)
class GridFacts:
    """Where a grid was measured: for its captions, and for what is predicted from it.

    `block_bytes` are those of KV of 16 tokens, `running` requests are served at a time in a burst,
    in steps of at most `step_tokens`. `caveat` is what readers must know of the figures. By arm,
    CUDA graphs of its engine served steps of up to `graph_tokens`, 0 without graphs. A file of
    schema 2 does not say (None): on a GPU such engines served at most 64 requests, and had graphs
    of up to 128 tokens, or of up to 512 in later versions.
    """

    hardware: str
    versions: Mapping[str, str]
    model: str
    dtype: str
    block_bytes: int
    pool: int
    running: int
    caveat: str
    step_tokens: int = 2048
    graph_tokens: Mapping[str, int] | None = None

    def captured(self, *, linked: bool) -> int:
        """Tokens of the largest step that graphs of a kind of arms served; 0 without graphs."""
        if self.graph_tokens is None:
            return _UNRECORDED if self._on_gpu else 0
        parse, sizes = Registry().parse, self.graph_tokens.items()
        return max((n for arm, n in sizes if links_chunks(parse(arm)) is linked), default=0)

    def graphs(self) -> str:
        """The sizes of graphs in words: by arm, where they differ."""
        tokens = self.graph_tokens
        if not self._on_gpu or (tokens and not any(tokens.values())):
            return "no CUDA graphs"
        if tokens is None:
            return (
                f"CUDA graphs whose size its file does not say ({_UNRECORDED} tokens, or 512 later)"
            )
        found = []
        for size in sorted(set(tokens.values())):
            arms = [arm for arm, own in tokens.items() if own == size]
            only = "" if len(arms) == len(tokens) else f" ({', '.join(arms)})"
            found.append(f"{size:,}{only}")
        return f"CUDA graphs of up to {' and '.join(found)} tokens"

    def same_graphs(self, other: "GridFacts") -> bool:
        """Whether the arms that two grids have in common had graphs of the same sizes."""
        here, there = self.graph_tokens, other.graph_tokens
        if here is None or there is None:
            return here is there or not (self._on_gpu or other._on_gpu)
        return all(here[arm] == there[arm] for arm in here if arm in there)

    def graph_warning(self, grid: "GridFacts", name: str) -> str | None:
        """Why a grid's predictions may not be those of what was measured here, called `name`.

        None for the same graphs.
        """
        if self.same_graphs(grid):
            return None
        return (
            f"{name}: {self.graphs()}, --grid: {grid.graphs()}. Steps between these sizes take "
            "other times; measure the grid again (picbench measure break-even)."
        )

    @property
    def _on_gpu(self) -> bool:
        return self.versions.get("driver", "none") != "none"


def links_chunks(algorithm: Algorithm) -> bool:
    """Whether an algorithm maps chunks."""
    return algorithm.reuse is Reuse.CHUNKS


@dataclass(frozen=True, slots=True)
class MeasuredGrid:
    """All cells that were measured, and where."""

    facts: GridFacts
    cells: Sequence[MeasuredCell]

    def points(self) -> dict[GridPoint, list[MeasuredCell]]:
        """The repeats of each point, in order."""
        found: dict[GridPoint, list[MeasuredCell]] = {}
        for cell in sorted(self.cells, key=lambda cell: (cell.point, cell.seed)):
            found.setdefault(cell.point, []).append(cell)
        return found

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that any cell has, in the order of the first."""
        return tuple(dict.fromkeys(arm for cell in self.cells for arm in cell.arms))

    def about(self) -> str:
        """One line about where it was measured."""
        known = {name: text for name, text in self.facts.versions.items() if text != "none"}
        versions = ", ".join(f"{name} {text}" for name, text in known.items())
        return (
            f"{self.facts.model}, {self.facts.dtype}, {self.facts.hardware}, {versions}. "
            f"{self.facts.caveat}"
        ).rstrip()


def read_grid(path: Path, field: str = "grid") -> MeasuredGrid:
    """Read a file that `field` names. Raises ConfigError that names the field for no grid."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        if found.pop("schema", None) not in _READ:
            raise ConfigError(
                f"`{field}` {path}: no grid of schema {SCHEMA}", hint="measure it again"
            )
        return TypeAdapter(MeasuredGrid).validate_python(found)
    except OSError as error:
        hint = "name a grid.json"
        if field == "grid":
            hint += f", or one of the package's: {', '.join(packaged_grids())}"
        raise ConfigError(f"`{field}` {path}: {error.strerror}", hint=hint) from error
    except ValidationError as error:
        message = f"`{field}` {path}: {first_refusal(error)}"
        raise ConfigError(message, hint="measure it again") from error
    except ValueError as error:
        raise ConfigError(f"`{field}` {path}: {error}", hint="it must be JSON") from error


def write_grid(path: Path, grid: MeasuredGrid) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema": SCHEMA} | asdict(grid))


def packaged_grids() -> dict[str, Path]:
    """The grids that come with the package, by name."""
    return {path.stem: path for path in sorted(DATA.glob("*.json"))}


def choose_grid(name: str | None) -> MeasuredGrid | None:
    """The grid with this name, in this file, or None for ``none``.

    By default the package's grid of a GPU, the one of the last name, or None if it has none: a
    CPU's has to be named. Raises ConfigError for what is no grid.
    """
    known = packaged_grids()
    if name is None:
        name = next((stem for stem in reversed(known) if not stem.startswith("cpu")), "none")
    return None if name == "none" else read_grid(known.get(name, Path(name)))


def choose_calibration(path: str | None, grid: MeasuredGrid | None) -> MeasuredGrid | None:
    """Cells of the grid that were measured again, from this file; None without one.

    Raises ConfigError for what is no grid, and without a grid that it could calibrate.
    """
    if path is not None and grid is None:
        raise ConfigError(
            f"`calibration` {path}: there is no grid to calibrate", hint="name one with `grid`"
        )
    return read_grid(Path(path), "calibration") if path is not None else None
