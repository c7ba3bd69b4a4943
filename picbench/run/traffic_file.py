"""The settings of `picbench traffic`, and the request file that it writes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from rich.table import Table

from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Text
from picbench.errors import ConfigError, DataError, EngineError, first_refusal
from picbench.run.workload import reply_tokens
from picbench.settings import SettingsModel, parse_settings, setting
from picbench.store.provenance import quiet_engine
from picbench.tables.table import PipedConsole
from picbench.workloads import models
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.records import Record, file_records
from picbench.workloads.traffic.chunk_source import ChunkSource, build, plain_ids
from picbench.workloads.traffic.corpus import SYNTHETIC, Corpus
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.ragpulse import TraceReplay, read_trace
from picbench.workloads.traffic.settings import Traffic
from picbench.workloads.traffic.traffic_facts import TrafficFacts, measure

if TYPE_CHECKING:
    from picbench.engines.cache import TierInfo


#: The settings that there are for a trace.
_OF_TRACES = {"trace", "requests", "seed", "model", "speed", "longest", "max_tokens"}

#: Those that there are for nothing else.
_ONLY_OF_TRACES = ("speed", "longest")


class TrafficConfig(SettingsModel):
    """The settings of a request file; each field is an option of `picbench traffic`."""

    requests: int = setting(100, "Number of requests.", metavar="N")
    seed: int = setting(0, "For everything drawn.")
    dataset: str = setting(
        "musique",
        "Passages and questions of a data set, or synthetic: random tokens, for memory and time.",
        metavar="NAME",
    )
    data: str = setting(
        "bundled", "Rows of the data set.", metavar="bundled|DIR|FILE|hf:OWNER/NAME"
    )
    columns: str | None = setting(None, "As in picbench run.", metavar="NAME|FIELD=COLUMN,...")
    model: str = setting("testbed", "The model whose tokenizer makes the ids.", metavar="NAME")
    pool: int = setting(64, "Distinct chunks that requests share.", metavar="N")
    join: int = setting(1, "Least number of passages in a chunk.", metavar="N")
    chunk_tokens: int = setting(0, "Least number of tokens in a chunk.", metavar="N")
    passages: int = setting(8, "Passages of a generated context.", metavar="N")
    questions: int = setting(6, "Questions about a generated context.", metavar="N")
    chunks: str | None = setting(
        None,
        "Chunks of a request: those it asks about, and others. Without it, only the former.",
        metavar="N|LOW-HIGH",
    )
    zipf: float = setting(0.0, "Popularity of rank r is r^-A; 0: uniform.", metavar="A")
    cached: float | None = setting(
        None,
        "EPIC's context-cache ratio: this share of chunk tokens is in the cache before the run, "
        "the rest belong to one request only.",
        metavar="SHARE",
    )
    users: int | None = setting(None, "Users who each repeat one request.", metavar="N")
    rate: float | None = setting(
        None, "Arrivals per second; without it, a closed loop.", metavar="R"
    )
    arrivals: Literal["poisson", "uniform"] = setting(
        "poisson", "Gaps at --rate: random, or all the same."
    )
    max_tokens: int | None = setting(
        None, "Output tokens per request.", metavar="N", shown="the data set's", ge=1
    )
    trace: str | None = setting(
        None,
        "Replay real requests instead: the folder data of RAGPulse, with --requests, --speed, "
        "--longest, --max-tokens and --seed. Its passages and sessions are real, its text is "
        "random tokens.",
        metavar="DIR",
    )
    speed: float = setting(1.0, "Replay the arrivals of a trace F times as fast.", metavar="F")
    longest: int | None = setting(
        None, "Leave out requests of a trace with more tokens of prompt and reply.", metavar="N"
    )

    def replay(self) -> TraceReplay:
        """What is taken of a trace. Raises ConfigError for settings of other traffic."""
        others = sorted(self.model_fields_set - _OF_TRACES)
        if others:
            raise ConfigError(
                f"`trace` and `{others[0]}`: requests of a trace are as they were",
                hint=f"with a trace: {', '.join(f'`{name}`' for name in sorted(_OF_TRACES))}",
            )
        return TraceReplay(**self._given(TraceReplay))

    def _given(self, kind: type[TraceReplay | ChunkSource | Traffic]) -> dict[str, Any]:
        """The settings that are fields of a class."""
        names = [field.name for field in fields(kind)]
        return {name: getattr(self, name) for name in names if name in TrafficConfig.model_fields}

    def _refuse_replay(self) -> None:
        """Raise ConfigError for settings of a trace without one."""
        for name in _ONLY_OF_TRACES:
            if name in self.model_fields_set:
                raise ConfigError(f"`{name}` is for traces", hint="name one with `trace`")

    def _refuse_rows(self) -> None:
        """Raise ConfigError for settings of rows that are not read."""
        if self.dataset == SYNTHETIC and self.data != BUNDLED:
            raise ConfigError(
                f"`data` {self.data}: {SYNTHETIC} has random tokens", hint="name a `dataset`"
            )
        if self.columns is not None and self.data == BUNDLED:
            raise ConfigError(
                f"`columns` {self.columns}: generated rows have no other fields",
                hint="name rows with `data`",
            )

    def source(self, model: models.ModelSpec) -> ChunkSource:
        """Where chunks and questions come from; the length of replies may be the model's.

        Raises ConfigError for settings of rows where there are none.
        """
        self._refuse_rows()
        tokens = self.max_tokens or reply_tokens(self.dataset, model)
        return ChunkSource(**self._given(ChunkSource) | {"max_tokens": tokens})

    def traffic(self) -> Traffic:
        """How requests are drawn from it. Raises ConfigError for settings of a trace."""
        self._refuse_replay()
        if self.rate is None and "arrivals" in self.model_fields_set:
            raise ConfigError("`arrivals`: there is no rate", hint="give a `rate`")
        chosen = {"chunks": _span(self.chunks), "process": self.arrivals}
        return Traffic(**self._given(Traffic) | chosen)


@dataclass(frozen=True, slots=True)
class Written:
    """A request file that was written, and what is in it; `left_out` requests were too long."""

    fingerprint: str
    facts: TrafficFacts
    left_out: int = 0


def parse_traffic(values: Mapping[str, Any]) -> TrafficConfig:
    """Check raw values; raises ConfigError that names the first that is wrong."""
    return parse_settings(TrafficConfig, values, command="picbench traffic")


class TrafficWriter:
    """Writes request files; tokenizers, and chunks that several files draw from, are made once."""

    def __init__(self) -> None:
        self._tokenizers: dict[Path | str, Tokenizer] = {}
        self._corpora: dict[tuple[Path | str, ChunkSource, int], Corpus] = {}

    def write(self, path: Path, config: TrafficConfig, model: models.ModelSpec) -> Written:
        """Draw the requests, or take those of a trace, and write them.

        Raises ConfigError or DataError where that cannot be.
        """
        if config.trace is not None:
            return self._write_trace(path, Path(config.trace), config.replay(), model)
        source, traffic = config.source(model), config.traffic()
        stream = draw(traffic, self._corpus(source, traffic.seed, model))
        header = Header(
            dataset=source.dataset,
            synthetic=source.synthetic,
            settings={"model": model.name, "source": asdict(source), "traffic": asdict(traffic)},
        )
        return Written(write_requests(path, header, stream), measure(stream))

    def _write_trace(
        self, path: Path, folder: Path, replay: TraceReplay, model: models.ModelSpec
    ) -> Written:
        found = read_trace(folder, replay, plain_ids(self._tokenizer(model)))
        trace = {"format": "RAGPulse", "sha256": found.sha256, "left_out": found.left_out}
        header = Header(
            dataset=SYNTHETIC,
            synthetic=True,
            settings={"model": model.name, "trace": trace, "replay": asdict(replay)},
        )
        fingerprint = write_requests(path, header, found.stream)
        return Written(fingerprint, measure(found.stream), found.left_out)

    def _corpus(self, source: ChunkSource, seed: int, model: models.ModelSpec) -> Corpus:
        # Only random tokens differ between seeds.
        kind = (model.path, source, seed if source.dataset == SYNTHETIC else 0)
        if kind not in self._corpora:
            self._corpora[kind] = build(source, self._tokenizer(model), seed)
        return self._corpora[kind]

    def _tokenizer(self, model: models.ModelSpec) -> Tokenizer:
        if model.path not in self._tokenizers:
            self._tokenizers[model.path] = models.load_tokenizer(model)
        return self._tokenizers[model.path]


def _span(text: str | None) -> tuple[int, int] | None:
    """Read ``8`` or ``4-12``."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ConfigError(f"`chunks` {text!r} is no number of chunks", hint="write 8 or 4-12")
    return int(found[1]), int(found[2] or found[1])


#: JSON has lists and no tuples.
_Ids = Annotated[tuple[int, ...], Strict(False)]


class _Line(BaseModel):
    """One line of a chunk file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = Field(None, min_length=1)
    tokens: tuple[int, ...] | None = Field(None, min_length=1, strict=False)
    document: str | _Ids | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "_Line":
        if (self.text is None) == (self.tokens is None):
            raise ValueError("needs text or tokens, and not both")
        kind = str if self.text is not None else tuple
        if self.document is not None and not isinstance(self.document, kind):
            raise ValueError("its document must be text for text, token ids for tokens")
        return self


class WarmConfig(SettingsModel):
    """What chunks are compiled into; each field is an option of `picbench warm`."""

    chunks: str = setting(
        ...,
        'Chunks, one per line: {"text": "..."} or {"tokens": [1, 2, ...]}; for context=document '
        'with their documents: {"text": "...", "document": "..."}.',
        metavar="FILE",
    )
    tiers: str = setting(
        ...,
        "Where to put them; name a tier that other engines reach (disk, redis, ...).",
        metavar="KIND[:PLACE]:SIZE,...",
    )
    algo: str = setting(
        "mepic",
        "The algorithm that will use them: how chunks are padded and what precedes them.",
        metavar="NAME[:OPTION=VALUE...]",
    )
    prefix: str | None = setting(
        None, "The text in front of chunks, for anchored=on.", metavar="TEXT"
    )
    model: str = setting(
        "testbed",
        "As for picbench run; other weights never find these chunks.",
        metavar="testbed|PATH|ID|shape:NAME",
    )
    salt: str | None = setting(None, "Whose requests may use the chunks.", metavar="TENANT")


def read_chunks(path: Path) -> list[Chunk]:
    """The chunks of a file of rows (see `file_records`); raises DataError by file and line."""
    if not path.is_file():
        raise ConfigError(f"`chunks` {path}: no such file", hint="`chunks=FILE`")
    chunks = [_chunk(record) for record in file_records(path)]
    if not chunks:
        raise DataError(f"{path}: no chunks", hint='one {"text": "..."} a line')
    return chunks


def warm_tiers(config: WarmConfig, dtype: str, out: TextIO) -> int:
    """Compile chunks and store them in tiers; prints what each tier got, returns 0.

    Raises EngineError if a chunk was refused everywhere: it is then compiled when it is needed.
    """
    chunks = read_chunks(Path(config.chunks))
    quiet_engine()
    from picbench.engines.engine import Engine

    path, tiers = str(models.resolve(config.model).path), config.tiers
    prefix = Text(config.prefix) if config.prefix else None
    with Engine(EngineConfig(path, algorithm=config.algo, dtype=dtype, tiers=tiers)) as engine:
        cache = engine.cache
        cache.warm(chunks, prefix, salt=config.salt)
        found = cache.tiers
        kept = cache.stored(chunks, prefix, salt=config.salt)
        short = cache.recomputed(chunks, prefix, salt=config.salt)
    PipedConsole(file=out).print(_table(found))
    if short:
        what = "have nothing to store: requests recompute all of their tokens"
        print(f"{short} of {len(chunks)} chunks {what} under {config.algo}", file=out)
    if kept < len(chunks):
        raise EngineError(
            f"{len(chunks) - kept} of {len(chunks)} chunks were not stored",
            hint="give `tiers` more room, or see the warnings above",
        )
    return 0


def _table(tiers: "Sequence[TierInfo]") -> Table:
    table = Table("tier", "holds", "bytes", "stored now", "bytes stored", "refused", "failures")
    for tier in tiers:
        held = ["?" if n is None else str(n) for n in (tier.objects, tier.bytes)]
        done = (tier.stored, tier.stored_bytes, tier.refused, tier.failures)
        table.add_row(tier.name, *held, *map(str, done))
    return table


def _chunk(record: Record) -> Chunk:
    try:
        found = _Line.model_validate(record.values())
    except ValidationError as error:
        raise DataError(
            f"{record.source}: {first_refusal(error, lower=True)}",
            hint='one {"text": "..."} or {"tokens": [...]} a line',
        ) from error
    return Chunk(found.text, found.tokens, document=found.document)
