"""What `picbench measure` measures: each measurement's settings, and the function that measures.

The settings are the command's flags, the docstring of their class is its help. Functions are named
and not imported, so that help and lists import neither torch nor vLLM.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from picbench.engines.config import SharedDecode
from picbench.settings import MOST_DRAWN, PART, File, Folder, SettingsModel, Share, setting

#: The model that is served on a GPU where none is named.
LLAMA = "shape:llama-3.1-8b"

#: Where scores of all algorithms go, row by row.
PARTS = Path("results/testbed/algorithms")

Dtype = Literal["float32", "bfloat16"]

_COMMIT = setting(None, "Name of the measured code.", metavar="NAME", shown="this checkout's")
_DEVICE = setting("cuda", "cuda or cpu.")
_EAGER = setting(False, "Neither compile nor capture CUDA graphs.")
_SEED = setting(0, "For inputs and order.", ge=0)
_SHARED_DECODE = setting("auto", "For mepic's engine, as for picbench run.")
_SYNCHRONOUS = setting(False, "Schedule no step ahead.")
_TIME = setting(
    0.0,
    "Begin nothing that would not end within this time; the same command goes on.",
    metavar="S",
    shown="no limit",
    ge=0,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a measurement ended: what to print, and the exit code."""

    page: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A command `picbench measure NAME`: `function` is ``room.module:name`` below picbench.

    It takes `settings` and returns an Outcome. With `exact`, Triton multiplies float32 as such;
    where `interpreted`, it interprets kernels on a CPU.
    """

    name: str
    settings: type[SettingsModel]
    function: str
    exact: bool = False
    interpreted: bool = False


class Measured(SettingsModel):
    """Settings of everything that writes a page."""

    output: Folder = setting(Path("results/gpu"))
    commit: str | None = _COMMIT


class OnDevice(Measured):
    """Settings of what is measured on a GPU, or in small on a CPU."""

    device: str = _DEVICE


class Served(OnDevice):
    """Settings of measurements in engines of one model; on a CPU of a `small` one."""

    small: ClassVar[str] = "shape:tiny"
    model: str | None = setting(None, "Who serves it.", shown=f"{LLAMA}, shape:tiny on a CPU")

    @property
    def served(self) -> str:
        """The model that is served."""
        return self.model or (self.small if self.device == "cpu" else LLAMA)

    @property
    def served_dtype(self) -> str:
        """The type of weights and KV."""
        return "float32" if self.device == "cpu" else "bfloat16"


class WithModel(Served):
    """Settings of measurements of one model on all devices."""

    model: str = setting(LLAMA)
    repeats: int = setting(3, ge=1)


class InRounds(Served):
    """Settings of measurements that the next call continues."""

    rounds: int = setting(3, ge=1)
    seconds: float = _TIME
    estimate: bool = setting(False, "Say how long the rest takes; measure nothing.")


class ServeAll(OnDevice):
    """Settings of serving data sets by all algorithms."""

    model: str = setting("testbed", "Or a tuned variant.")
    dataset: tuple[str, ...] = setting((), metavar="NAME", shown="all six")
    """Only this one; repeat the flag for more."""
    algo: tuple[str, ...] = setting((), "Only these, and full.", metavar="SPEC")
    eager: bool = _EAGER
    kv_blocks: int = setting(16_384, "Pool of the engine, in blocks of 16 tokens.", ge=1024)
    max_requests: int = setting(64, ge=1)
    seed: int = _SEED


class ServeScores(ServeAll):
    """Score all algorithms on every row, in batches of all of them; exit 4 if rows are missing.

    Each data set is a file in the output folder, and the same command continues where it was
    stopped. Several may run at once, each with a data set of its own.
    """

    output: Folder = setting(PARTS)
    dtype: Dtype = setting("bfloat16", shown=False)
    rows: int = setting(200, "Rows of each data set.", ge=1)
    first: int = setting(0, "Skip this many rows.", ge=0)
    drop: bool = setting(False, "Leave out the passages before those that answer.")
    seconds: float = setting(0.0, "Begin no rows after this time.", shown="no limit", ge=0)


class ServeAlone(ServeAll):
    """Compare a batch of all algorithms with each request alone; exit 3 if float32 differs."""

    dtype: Dtype = setting("float32", shown=False)
    requests: int = setting(200, ge=1, le=MOST_DRAWN)


class ScoredPage(SettingsModel):
    """Make tables and the figure from the scores; needs no engine."""

    parts: Folder = setting(PARTS, "The output folder of picbench measure algorithms serve.")
    output: Folder = setting(PARTS.parent)


class Sinks(Measured):
    """How much of the question's attention to chunks their first tokens draw, by layer."""

    output: Folder = setting(Path("results/accuracy"))
    model: tuple[str, ...] = setting(("smollm2", "testbed"), metavar="MODEL")
    """Repeat the flag to compare."""
    dataset: str = setting("musique", "Of bundled rows.", metavar="NAME")
    rows: int = setting(10, ge=1)


class OfGrid(Served):
    """Settings of what is served to measure a grid, or to check one."""

    small: ClassVar[str] = "testbed"
    model: str | None = setting(None, "Who serves it.", shown=f"{LLAMA}, the testbed on a CPU")
    dtype: Dtype | None = setting(None, "Of weights and KV.", shown="bfloat16, float32 on a CPU")
    part: Share = PART
    caveat: str = setting("", "What readers must know of the figures.", metavar="TEXT", shown=False)

    @property
    def served_dtype(self) -> str:
        """The type of weights and KV."""
        return self.dtype or super().served_dtype


class BreakEven(OfGrid):
    """Serve a grid of traffic under full, prefix, reorder, mepic, and naive: on a GPU small steps.

    Reuse, chunks, their length, the corpus, arrivals, cold and warm caches, three seeds, in stages
    of which each leaves a grid that is of use. Exit 4 if cells are left.
    """

    output: Folder = setting(Path("results/break_even"), "A stopped measurement continues there.")
    seconds: float = _TIME
    dry_run: bool = setting(False, "Say what is left to do and how long it may take.")
    page: bool = setting(False, "Only make tables and figures of what is measured.")


class DecodePlanned(Measured):
    """What decoding a planned request costs on a CPU; exit 1 if it costs too much.

    That is beside a plain request in the same engine. Threads are as many as OMP_NUM_THREADS says.
    """

    output: Folder = setting(Path("results/cpu"))
    model: str = setting("testbed")
    rounds: int = setting(21, ge=2)


class OracleCheck(SettingsModel):
    """Compare an engine with the oracle; exit 1 where they differ."""

    device: str = _DEVICE
    model: str = setting("testbed", "With full attention and RoPE.")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", shown=False)
    eager: bool = _EAGER
    synchronous: bool = _SYNCHRONOUS
    keys_without_rope: bool = setting(False, "Cache all keys without RoPE.")
    tensor_parallel: int = setting(1, "GPUs of the engine.", shown=False, ge=1)
    shared_decode: SharedDecode = setting("off", "As for picbench run.")


class Architectures(OnDevice):
    """Compare engines with the oracle on a tiny model of each architecture; exit 1 where wrong.

    Needs no network. Architectures that are refused must be refused for the reason that picbench
    list models gives.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", shown=False)
    eager: bool = _EAGER
    only: tuple[str, ...] = setting((), "Only these; repeat the flag for more.", metavar="NAME")
    jobs: int = setting(1, "At a time.", ge=1)


class Storm(Measured):
    """Compare a starved pool under mixed requests and aborts with a large one; exit 1 if wrong."""

    model: str = setting("shape:small")
    device: str = setting("auto", "cuda or cpu.")
    dtype: Dtype = setting("float32", shown=False)
    eager: bool = _EAGER
    synchronous: bool = _SYNCHRONOUS
    tensor_parallel: int = setting(1, "Workers.", shown=False, ge=1)
    pool: int = setting(5000, "Blocks.", ge=32)
    tiers: str = setting("", "As for picbench run.", shown="none")
    requests: int = setting(1000, ge=1, le=100_000)
    longest: int = setting(32_000, "Tokens; shapes get as many positions.", ge=256, le=MOST_DRAWN)
    preemptions: int = setting(0, "At least this many.")
    seed: int = _SEED


class EngineComparison(Measured):
    """Time the engine against stock vLLM on one GPU."""

    model: str = setting(LLAMA)
    repeats: int = setting(5, ge=1)


class Accuracy(OnDevice):
    """Score the testbed model in the engine; exit 3 where its card has another score."""

    dtype: Dtype = setting("bfloat16", shown=False)
    rows: int = setting(200, "Of each set. The card is about 200: others are not judged.", ge=1)
    eager: bool = _EAGER


class HostTier(WithModel):
    """Check chunks from the host's memory, then time stores and loads, and requests meanwhile."""

    chunks: int = setting(64, "A prompt.", ge=2)


class SmallSteps(WithModel):
    """TTFT of prompts that compute few tokens, by the size of graphs, and the GPU's part of it."""

    graph_tokens: tuple[Annotated[int, Ge(1)], ...] = setting((512, 1024))
    """The largest step, in tokens, that CUDA graphs serve; two engines for each value."""


class Kernels(SettingsModel):
    """Check the kernels, then time them against those that vLLM itself uses.

    On a GPU that is FlashAttention-3, on a CPU vLLM's own attention. A kernel whose output is wrong
    is not timed: the command ends with exit code 3. Prints a table.
    """

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: what vLLM serves here.")
    output: Folder = setting(Path("runs/kernels"))
    """Tables; on a GPU, cases that these have of the same commit are kept."""
    rounds: int = setting(21, "Of a case.", ge=5)
    seconds: float = setting(20.0, "Of a case on a CPU.", ge=0)
    threads: int | None = setting(None, "Of a CPU.", shown="all cores", ge=1)
    work: tuple[Literal["decode", "link", "prefill", "chunked"], ...] = setting(())
    """Only cases of these kinds; a GPU has decode and link, a CPU all but link."""
    seed: int = _SEED
    commit: str | None = _COMMIT


class DecodeShared(OnDevice):
    """Check decode that reads shared chunks once, then time it against FlashAttention-3.

    A kernel whose output is wrong is not timed: the command ends with exit code 3. On a CPU kernels
    are interpreted, and tiny scenes are checked.
    """

    rounds: int = setting(15, "Of a case.", ge=2)
    case: tuple[int, ...] = setting((), "Only these, by number from 0.")
    seed: int = _SEED


class ProfileCheck(OfGrid):
    """Serve three traces that no grid has, and compare with what picbench profile predicts.

    Repeats that are done are kept. Exit 4 if repeats are left.
    """

    output: Folder = setting(Path("runs/profile"))
    grid: str = setting(..., "See picbench profile.", metavar="NAME|FILE")
    calibration: str | None = setting(None, "See picbench profile.", metavar="FILE")
    seed: int | None = setting(None, "What the traces are drawn with.", shown="that of the results")
    repeats: int = setting(3, ge=1, le=MOST_DRAWN)
    seconds: float = _TIME


class DecodeUnderLoad(InRounds):
    """Decoding of 64 requests of 32k tokens that share chunks, against stock vLLM.

    Rounds that are done are kept; other settings or another commit start over. Exit 4 if rounds
    are left.
    """

    sharing: bool = setting(False, "Measure over degrees of sharing instead, with a figure.")
    reply: int | None = setting(None, "Tokens.", metavar="N", shown="512, 32 for --sharing", ge=8)


class LoadReport(InRounds):
    """Loads of mepic and of stock vLLM, each with a server of its own, several times.

    Nothing shared, more requests than can be served, plain requests beside long prompts, cold
    prompts, a closed loop over corpora, rates. Cells that are done are kept; another commit starts
    over. Exit 4 if cells are left.
    """

    only: tuple[str, ...] = setting((), metavar="GROUP", shown="all")
    """share-nothing, 2wiki, mixed, cold, closed or rate; repeat the flag for more."""
    shared_decode: SharedDecode = _SHARED_DECODE
    rounds: int = setting(5, ge=1)


class Scaling(InRounds):
    """Throughput of an engine on several GPUs against one, and of stock vLLM.

    Rounds that are done are kept; another commit starts over. Exit 4 if rounds are left.
    """

    workers: int = setting(2, "GPUs of the larger engine.", ge=2)
    shared_decode: SharedDecode = _SHARED_DECODE
    graph_tokens: int | None = setting(None, shown="the engine's own", ge=1)
    """Largest step of mepic's engines with a CUDA graph."""


class AllSteps(Measured):
    """Run every check on a GPU, then every measurement; continue where an earlier call stopped."""

    only: tuple[str, ...] = setting((), "Run these steps and no others.", metavar="STEP")
    redo: bool = setting(False, "Repeat steps that are done.")
    list: bool = setting(False, "Show the steps; run none.")
    runs: Folder = setting(Path("runs/gpu"), "Folder for scratch files.")


class Tiers(SettingsModel):
    """How fast tiers store and fetch chunks."""

    tiers: str = setting(..., "Tiers to measure, each alone, as for picbench run.")
    sizes: str = setting("1MiB,4MiB,16MiB,32MiB", "Value sizes.")
    batch: str = setting("64MiB", "Bytes in flight at a time.")
    rounds: int = setting(7, ge=1)
    seed: int = _SEED
    output: File | None = setting(None, "JSON file to write.")


#: What groups of measurements are about.
GROUPS = {"algorithms": "Every algorithm in one engine: scores, and answers alone or in a batch."}

MEASUREMENTS = (
    Measurement("accuracy", Accuracy, "papers.serve_arms:measure_accuracy", exact=True),
    Measurement("algorithms serve", ServeScores, "papers.serve_arms:serve", exact=True),
    Measurement("algorithms alone", ServeAlone, "papers.serve_arms:measure_alone", exact=True),
    Measurement("algorithms page", ScoredPage, "papers.arm_scores:scored_page"),
    Measurement("all", AllSteps, "experiments.steps:measure"),
    Measurement("architectures", Architectures, "experiments.oracle:check_architectures"),
    Measurement("break-even", BreakEven, "experiments.break_even:measure"),
    Measurement("decode", DecodePlanned, "experiments.engine_speed:measure_decode_cost"),
    Measurement("decode-load", DecodeUnderLoad, "experiments.decode_load:measure"),
    Measurement(
        "engine-comparison", EngineComparison, "experiments.engine_speed:ENGINE_COMPARISON.measure"
    ),
    Measurement("host-tier", HostTier, "experiments.tiers:HOST_TIER.measure", exact=True),
    Measurement("kernels", Kernels, "experiments.kernels:measure"),
    Measurement("load-report", LoadReport, "experiments.load_report:LOAD_REPORT.measure"),
    Measurement("oracle", OracleCheck, "experiments.oracle:measure", exact=True),
    Measurement("profile", ProfileCheck, "experiments.profile_check:measure"),
    Measurement("scaling", Scaling, "experiments.decode_load:SCALING.measure"),
    Measurement(
        "shared-decode", DecodeShared, "experiments.shared_kernels:measure", interpreted=True
    ),
    Measurement("sinks", Sinks, "papers.layers:measure_sinks"),
    Measurement("small-steps", SmallSteps, "experiments.engine_speed:SMALL_STEPS.measure"),
    Measurement("storm", Storm, "experiments.storm:measure", exact=True),
    Measurement("tiers", Tiers, "experiments.tiers:measure"),
)
