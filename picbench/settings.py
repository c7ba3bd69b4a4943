"""Settings, each declared once: of `run`, `compare`, `traffic`, `profile`, `serve` and `warm`.

A field of a settings model has its default, its bounds and its description here; the command line
makes its flags of them (`picbench.cli.options.options_of`), sweeps take their keys from them, and
manifests have their values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picbench.engines.config import DEFAULT_TIERS, CompileOrder, OnPressure, SharedDecode
from picbench.errors import ConfigError, check_range, first_refusal

Config = TypeVar("Config", bound=BaseModel)

#: Paths that are checked where they are given: a file, a folder.
File = Annotated[Path, "file"]
Folder = Annotated[Path, "folder"]

#: (k, n): the k-th of n shares, written ``1/2``.
Share = Annotated[tuple[int, int], "share"]

#: The most requests, chunks, or tokens of a chunk that are drawn: more would not be held.
MOST_DRAWN = 1_000_000

#: Two names with a comma between them.
Pair = Annotated[tuple[str, str], "pair"]


class SettingsModel(BaseModel):
    """Settings that nothing can be added to, and that do not change.

    A description that does not fit a field's line stands below it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True, use_attribute_docstrings=True
    )


def setting(
    default: Any,
    description: str | None = None,
    *,
    metavar: str | None = None,
    shown: str | bool = True,
    flag: str | None = None,
    later: bool = False,
    **bounds: Any,
) -> Any:
    """A field with what a user sees of it; `bounds` are pydantic's.

    `metavar` stands for its value, `shown` is what help says of the default (False: nothing), and
    `flag` is its flag where that is not made of the field's name. One that came `later` is no part
    of a run's fingerprint where it has its default.
    """
    extra: dict[str, Any] = {"metavar": metavar, "shown": shown, "flag": flag, "later": later}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


#: The share of a measurement that one process takes.
PART = setting(
    (1, 1),
    "Measure the K-th of N shares; N processes, each on a GPU of its own, write the same output.",
    metavar="K/N",
    shown="all",
)


class RunConfig(SettingsModel):
    """The settings of one run; each field is an option of `picbench run`.

    None leaves the choice to picbench: all rows, the data set's output length, a context of the
    longest request, a pool that holds the whole workload or as much of it as the GPU has room for,
    the device's default tiers, a new folder below ``runs``.
    """

    algo: tuple[str, ...] = setting(
        ..., metavar="NAME[:OPTION=VALUE...][,NAME...]", shown="mepic; with --arm, none"
    )
    """Arms beside full and prefix, such as epic:k=16; repeat the flag or use commas. nocontext is
    full recompute of prompts without their chunks."""
    arm: tuple[str, ...] = setting(
        (), metavar="NAME=URL[,model=ID][,algo=SPEC][,timeout=SECONDS][,simulated=yes]"
    )
    """An external OpenAI-compatible server as an arm beside those of --algo, if any, such as
    theirs=http://host:8000/v1; repeat the flag for more. With algo=SPEC, requests name their chunks
    and that algorithm, as picbench's server takes them; exit code 3 if it reuses none. Its API key
    is read from OPENAI_API_KEY. Numbers of a simulated server are marked everywhere."""
    dataset: str = setting("", "See picbench list datasets.", metavar="NAME", shown=False)
    requests: str | None = setting(None, metavar="FILE|DIR")
    """Replay requests instead of a data set's rows: a log, sessions, a trace, or what picbench
    traffic wrote, as for picbench profile; see docs/traffic.md."""
    data: str = setting("bundled", metavar="bundled|DIR|FILE|hf:OWNER/NAME|hub", min_length=1)
    """Rows: synthetic ones that picbench generates; a folder with NAME/*.jsonl (.json, .parquet,
    .arrow), or one file; a data set on the hub, hf:OWNER/NAME[@REVISION][:[CONFIG/]SPLIT]; or
    LongBench's at a pinned revision (hub:OWNER/NAME[@REVISION] for a copy of it)."""
    reuse: float | None = setting(
        None, metavar="SHARE", shown="rows as they come", later=True, ge=0, le=1
    )
    """Draw requests that share the rows' chunks, in new orders: this share of the chunk tokens is
    in the cache before the run, the rest is new to it. 48 requests, or --limit."""
    columns: str | None = setting(
        None, metavar="NAME|FIELD=COLUMN,...|FILE.yaml", shown="LongBench's", min_length=1
    )
    """Which columns of --data the fields of a row are in; see picbench list columns."""
    offline: bool = setting(False)
    """Take rows and models from the hub's cache on this machine only (HF_HUB_OFFLINE=1)."""
    model: str = setting("testbed", metavar="testbed|smollm2|PATH|ID|shape:NAME", min_length=1)
    """The model that comes with picbench, a folder, an id on the hub, or another that picbench list
    models names."""
    limit: int | None = setting(None, "Rows to run.", metavar="N", shown="all rows", ge=1)
    seed: int = setting(0, ge=0, lt=1 << 32)  # What vLLM takes.
    """For the engine and the choice of rows; 0 takes rows in order."""
    concurrency: int = setting(4, metavar="N", ge=1)
    """Requests in flight in an arm, each replaced as it ends."""
    rate: float | None = setting(
        None, metavar="R", shown="the request file's, or a closed loop", gt=0, allow_inf_nan=False
    )
    """Open loop: R requests arrive per second on average, however long the queue is. --concurrency
    is then ignored, and the arms run one after another."""
    arrivals: Literal["poisson", "uniform"] = setting("poisson")
    """Gaps between arrivals at --rate: random, or all the same."""
    max_running: int = setting(64, metavar="N", ge=1)
    """Most requests that an engine computes at a time; others wait in its queue."""
    slo: str | None = setting(None, metavar="ttft=MS[,tpot=MS][,e2e=MS]")
    """Latency objectives: goodput counts the requests that meet all of them."""
    max_tokens: int | None = setting(None, metavar="N", shown="the data set's", ge=1)
    """Output tokens per request."""
    kv_blocks: int | None = setting(
        None, metavar="N", shown="what the workload needs, or fits the GPU", ge=1
    )
    """KV pool of each arm, in blocks of 16 tokens."""
    tiers: str | None = setting(
        None,
        'Where chunk KV is stored below the pool, nearest first; see picbench list tiers. "": '
        "nowhere.",
        metavar="KIND[:PLACE]:SIZE,...",
        shown=f"{DEFAULT_TIERS['cpu']} on a CPU, none on a GPU",
    )
    on_pressure: OnPressure = setting("wait")
    """What happens to a request that needs more KV blocks than are free or can be evicted."""
    compile_order: CompileOrder = setting("head", later=True)
    """When missing chunks are compiled: right before the first request that needs them, those of
    all waiting requests before any of these runs, or in order of arrival, interleaved with other
    requests (MiniPIC's ISPS)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto")
    """Type of weights and KV; auto is the model's own, or float32 on a CPU that has neither
    AVX512_BF16 nor AMX."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto")
    """What engines run on; auto is what the installed vLLM supports here."""
    tensor_parallel: int = setting(1, metavar="N", ge=1)
    """GPUs of each engine; on CPU, processes that share the cores."""
    eager: bool = setting(False)
    """Neither compile the model nor capture CUDA graphs: engines start faster, run slower."""
    keys_without_rope: bool = setting(False, later=True)
    """Cache every key of a PIC engine without RoPE, as MEPIC and MiniPIC describe it. On CPU the
    keys of chunks are always cached this way."""
    shared_decode: SharedDecode = setting("auto", later=True)
    """On a GPU, whether decoding steps read a chunk once for all requests that see it: where that
    is expected to be faster (auto), or wherever two do (always, for checks)."""
    context: int | None = setting(None, metavar="N", shown="the model's", ge=16)
    """Tokens of prompt and output; longer prompts lose their middle."""
    prompts: str | None = setting(None, metavar="FILE", shown="picbench's own prompts")
    """Prompt templates in LongBench's JSON format."""
    chat: Literal["auto", "on", "off"] = setting("auto")
    """The tokenizer's chat template around prompts; auto: if there is one, but not around few-shot
    prompts (samsum), as in LongBench."""
    scoring: str = setting(
        "longbench", metavar="longbench|longbench-zh|cacheblend|likelihood|fidelity[,...]"
    )
    """LongBench's word F1 and Rouge-L, its ones for Chinese (longbench-zh), or CacheBlend's over
    token ids and stemmed words. Alone or after a comma, likelihood also asks how likely an arm
    finds the right answer, and fidelity how far it is from full along full's reply."""
    grid: str | None = setting(None, metavar="MIN-MAX:LENGTHSxDEPTHS", shown="1000-11000:20x10")
    """Haystack tokens and needle depths, for needle over a folder of text files; prompt tokens and
    depths, for ruler (there by default up to 4096 tokens)."""
    drop: Literal["lead"] | None = setting(None, shown="nothing", later=True)
    """Leave passages out of prompts: what precedes a passage that the answer needs in its document.
    Only KV that was compiled with context=document knows it then."""
    cache: Literal["cold", "warm", "steady"] | None = setting(
        None, shown="empty at start, kept between requests", later=True
    )
    """Declare the state of the arms' caches, and verify it from counters: dropped before each group
    of requests, filled with all chunks before the first one, or kept over 200 different prompts or
    more. A run that was in another state is invalid (exit 3)."""
    repeats: int = setting(1, metavar="N", ge=1, later=True)
    """Run all requests N times, each time from the same state of caches as the first time."""
    output: str | None = setting(
        None, metavar="DIR", shown="runs/<utc>-<dataset>-<model>-<fingerprint>"
    )
    """Run directory: new, empty, or of the same command, which then resumes it. By default an
    unfinished run of the same settings in runs/ is resumed."""
    same_engine: bool = setting(False)
    """Run full and prefix in the PIC engine too, instead of in stock vLLM."""
    on_bad_row: Literal["stop", "skip"] = setting("stop")
    """What to do about a malformed row; skipped ones are counted."""
    self_check: bool = setting(False)
    """Before measuring, compare in each PIC engine ways to serve a prompt that must give the same
    answer; see picbench doctor."""

    def published(self) -> dict[str, Any]:
        """The settings as JSON values for files that are passed on: without passwords."""
        from picbench.engines.chunk_cache.tiers.notation import without_credentials

        tiers = None if self.tiers is None else without_credentials(self.tiers)
        return self.model_dump(mode="json") | {"tiers": tiers}


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check raw values; raises ConfigError that names the first that is wrong."""
    return parse_settings(RunConfig, values, command="picbench run")


def parse_settings(kind: type[Config], values: Mapping[str, Any], command: str) -> Config:
    """Check the settings of a command; raises ConfigError that names the first that is wrong."""
    for name, value in values.items():
        check_range(name, value)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = first_refusal(error, lower=True)
        raise ConfigError(
            f"`{first.path[0]}` {first.value!r}: {first.message}", hint=f"see {command} `help`"
        ) from error


class ComparisonSettings(SettingsModel):
    """What to compare, and what to put up with; each field is an option of `picbench compare`."""

    arms: Pair | None = setting(
        None,
        "Compare this arm of the first run with that arm of the second.",
        metavar="BEFORE,AFTER",
        shown="each arm with the arm of the same name; in one run, full with each other arm",
    )
    margin: float | None = setting(None, metavar="LOSS", ge=1e-6, le=1)
    """The acceptable loss of score, from 0 to 1: say whether the loss is smaller, with 95 %
    confidence, and how many samples would decide it."""
    allow_mismatch: bool = setting(False)
    """Compare runs of different settings or requests anyway, and say so in the output."""
    seed: int = setting(0, "For resampling.")


class TrafficConfig(SettingsModel):
    """The settings of a request file; each field is an option of `picbench traffic`."""

    requests: int = setting(100, "Number of requests.", metavar="N", le=MOST_DRAWN)
    seed: int = setting(0, "For everything drawn.")
    dataset: str = setting("musique", metavar="NAME")
    """Passages and questions of a data set, or synthetic: random tokens, for memory and time."""
    data: str = setting("bundled", metavar="bundled|DIR|FILE|hf:OWNER/NAME")
    """Rows of the data set."""
    columns: str | None = setting(None, "As in picbench run.", metavar="NAME|FIELD=COLUMN,...")
    model: str = setting("testbed", "The model whose tokenizer makes the ids.", metavar="NAME")
    pool: int = setting(64, "Distinct chunks that requests share.", metavar="N", le=MOST_DRAWN)
    join: int = setting(1, "Least number of passages in a chunk.", metavar="N", le=MOST_DRAWN)
    chunk_tokens: int = setting(0, "Least number of tokens in a chunk.", metavar="N", le=MOST_DRAWN)
    passages: int = setting(8, "Passages of a generated context.", metavar="N", le=MOST_DRAWN)
    questions: int = setting(6, "Questions about a generated context.", metavar="N", le=MOST_DRAWN)
    chunks: str | None = setting(None, metavar="N|LOW-HIGH")
    """Chunks of a request: those it asks about, and others. Without it, only the former."""
    zipf: float = setting(0.0, "Popularity of rank r is r^-A; 0: uniform.", metavar="A")
    cached: float | None = setting(None, metavar="SHARE")
    """EPIC's context-cache ratio: this share of chunk tokens is in the cache before the run, the
    rest belong to one request only."""
    users: int | None = setting(None, "Users who each repeat one request.", metavar="N")
    rate: float | None = setting(None, metavar="R")
    """Arrivals per second; without it, a closed loop."""
    arrivals: Literal["poisson", "uniform"] = setting("poisson")
    """Gaps at --rate: random, or all the same."""
    max_tokens: int | None = setting(None, metavar="N", shown="the data set's", ge=1)
    """Output tokens per request."""
    trace: str | None = setting(None, metavar="FILE|DIR")
    """Replay real requests instead: any that picbench profile reads, with --requests, --speed,
    --longest, --max-tokens and --seed. What has no text becomes random tokens."""
    speed: float = setting(1.0, "Replay the arrivals of a trace F times as fast.", metavar="F")
    longest: int | None = setting(None, metavar="N")
    """Leave out requests of a trace with more tokens of prompt and reply."""


class ProfileConfig(SettingsModel):
    """How reuse in a trace is counted; each field is an option of `picbench profile`."""

    algo: str = setting(
        "full,prefix,reorder,epic:k=16,epic:k=16:copy=shared,mepic,naive,"
        "mepic:anchor=head:context=document",
        metavar="SPEC,...",
    )
    """Arms to count: any of picbench list algorithms, with its options."""
    pool: int | None = setting(None, metavar="BLOCKS", shown="nothing is evicted", ge=1)
    """Count with a KV pool of this many blocks of 16 tokens, too."""
    running: int = setting(16, "Requests at a time, for throughput and memory.", metavar="N", ge=1)
    requests: str | None = setting(
        None, "FILE by another name, as of picbench run.", metavar="FILE"
    )
    limit: int | None = setting(None, "Only the first N.", metavar="N", shown="all", ge=1)
    model: str = setting("testbed", "The model whose tokenizer encodes texts.", metavar="NAME")
    grid: str | None = setting(None, metavar="NAME|FILE", shown="h200-llama-3.1-8b")
    """Predict from this measured grid: one of the package's, or a grid.json; none: only count."""
    calibration: str | None = setting(None, metavar="FILE")
    """Predict times of another machine, on which some cells of the grid were measured again: a
    grid.json of picbench measure break-even --seconds 300."""
    figure: File | None = setting(None, metavar="FILE")
    """Draw the computed tokens, as FILE.png and FILE.svg."""


class ServeConfig(SettingsModel):
    """What servers do with prompts; each field is an option of `picbench serve`."""

    algo: str = setting("mepic", metavar="NAME[:OPTION=VALUE...]")
    """The algorithm of requests that name none; see picbench list algorithms."""
    marks: str | None = setting(None, metavar="on|OPEN,CLOSE")
    """Make chunks of the text between marks in prompts; on: <<doc>> and <</doc>>."""
    parts: str | None = setting(None, metavar="KIND[,KIND...]")
    """Make chunks of documents, breakpoints, tools, turns or templates in messages; without
    --marks, only of these: marks are secret then."""
    usage: bool = setting(False)
    """Say in usage.pic of every answer what became of the prompt, not only where it is asked."""
    show_command: bool = setting(False)
    """Print the command that would start the server, for a shell, and start nothing."""


class WarmConfig(SettingsModel):
    """What chunks are compiled into; each field is an option of `picbench warm`."""

    chunks: str = setting(..., metavar="FILE")
    """Chunks, one per line: {"text": "..."} or {"tokens": [1, 2, ...]}; for context=document with
    their documents: {"text": "...", "document": "..."}."""
    tiers: str = setting(..., metavar="KIND[:PLACE]:SIZE,...")
    """Where to put them; name a tier that other engines reach (disk, redis, ...)."""
    algo: str = setting("mepic", metavar="NAME[:OPTION=VALUE...]")
    """The algorithm that will use them: how chunks are padded and what precedes them."""
    prefix: str | None = setting(None, "The text in front of chunks, for anchors.", metavar="TEXT")
    model: str = setting("testbed", metavar="testbed|smollm2|PATH|ID|shape:NAME")
    """As for picbench run; other weights never find these chunks."""
    salt: str | None = setting(None, "Whose requests may use the chunks.", metavar="TENANT")
