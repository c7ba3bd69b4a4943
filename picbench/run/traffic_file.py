"""The request file that `picbench traffic` writes, and the chunks that `picbench warm` stores."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from rich.table import Table

from picbench.engines.chunk_cache.tiers.notation import probe_tiers
from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Text
from picbench.errors import ConfigError, DataError, EngineError
from picbench.files import reading
from picbench.run.workload import reply_tokens
from picbench.settings import TrafficConfig, WarmConfig, parse_settings
from picbench.store.provenance import quiet_engine
from picbench.tables.table import PipedConsole
from picbench.workloads import models
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.records import file_records
from picbench.workloads.traffic.chunk_source import ChunkSource, build
from picbench.workloads.traffic.corpus import SYNTHETIC
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.replay import TraceReplay, read_trace
from picbench.workloads.traffic.settings import Traffic
from picbench.workloads.traffic.traffic_facts import TrafficFacts, measure


def replay_of(config: TrafficConfig) -> TraceReplay:
    """What is taken of a trace. Raises ConfigError for settings of other traffic."""
    known = {"trace", *(field.name for field in fields(TraceReplay)), "model"}
    if others := sorted(config.model_fields_set - known):
        raise ConfigError(
            f"`trace` and `{others[0]}`: requests of a trace are as they were",
            hint=f"with a trace: {', '.join(f'`{name}`' for name in sorted(known))}",
        )
    return TraceReplay(**_given(config, TraceReplay))


def source_of(config: TrafficConfig, model: models.ModelSpec) -> ChunkSource:
    """Where chunks and questions come from; the length of replies may be the model's."""
    tokens = config.max_tokens or reply_tokens(config.dataset, model)
    return ChunkSource(**_given(config, ChunkSource) | {"max_tokens": tokens})


def traffic_of(config: TrafficConfig) -> Traffic:
    """How requests are drawn. Raises ConfigError for settings that others make meaningless."""
    given, asked = config.model_fields_set, "1" if config.chunks is None else config.chunks
    span = re.fullmatch(r"(\d+)(?:-(\d+))?", asked)
    unpaced = config.rate is None and "arrivals" in given
    random = f"`data` {config.data}: {SYNTHETIC} has random tokens"
    generated = f"`columns` {config.columns}: generated rows have no other fields"
    for wrong, what, hint in (
        ("speed" in given, "`speed` is for traces", "name one with `trace`"),
        ("longest" in given, "`longest` is for traces", "name one with `trace`"),
        (unpaced, "`arrivals`: there is no rate", "give a `rate`"),
        (config.dataset == SYNTHETIC and config.data != BUNDLED, random, "name a `dataset`"),
        (config.columns is not None and config.data == BUNDLED, generated, "name rows with `data`"),
        (span is None, f"`chunks` {asked!r} is no number of chunks", "write 8 or 4-12"),
    ):
        if wrong:
            raise ConfigError(what, hint=hint)
    chunks = (int(span[1]), int(span[2] or span[1])) if span and config.chunks else None
    return Traffic(**_given(config, Traffic) | {"chunks": chunks, "process": config.arrivals})


def _given(
    config: TrafficConfig, kind: type[TraceReplay | ChunkSource | Traffic]
) -> dict[str, Any]:
    """The settings that are fields of a class."""
    return config.model_dump(include={field.name for field in fields(kind)})


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
        self._load = cache(models.load_tokenizer)
        self._corpus = cache(lambda source, model, seed: build(source, self._load(model), seed))

    def write(self, path: Path, config: TrafficConfig, model: models.ModelSpec) -> Written:
        """Draw the requests, or take those of a trace, and write them.

        Raises ConfigError or DataError where that cannot be.
        """
        dataset, synthetic, left_out = SYNTHETIC, True, 0
        if config.trace is not None:
            replay = replay_of(config)
            found = read_trace(Path(config.trace), replay, self._load(model))
            stream, left_out, synthetic = found.stream, found.left_out, not found.exact
            dataset = stream.samples[0].dataset
            trace = {"format": found.kind, "sha256": found.sha256, "left_out": left_out}
            settings: dict[str, object] = {"trace": trace, "replay": asdict(replay)}
        else:
            traffic, source = traffic_of(config), source_of(config, model)
            dataset, synthetic = source.dataset, source.synthetic
            # Only random tokens differ between seeds.
            seed = traffic.seed if dataset == SYNTHETIC else 0
            stream = draw(traffic, self._corpus(source, model, seed))
            settings = {"source": asdict(source), "traffic": asdict(traffic)}
        header = Header(
            dataset=dataset, synthetic=synthetic, settings={"model": model.name, **settings}
        )
        return Written(write_requests(path, header, stream), measure(stream), left_out)


class _Line(BaseModel):
    """One line of a chunk file; JSON has lists and no tuples."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = Field(None, min_length=1)
    tokens: tuple[int, ...] | None = Field(None, min_length=1, strict=False)
    document: str | Annotated[tuple[int, ...], Strict(False)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("needs text or tokens, and not both")
        kind = str if self.text is not None else tuple
        if self.document is not None and not isinstance(self.document, kind):
            raise ValueError("its document must be text for text, token ids for tokens")
        return self


def read_chunks(path: Path) -> list[Chunk]:
    """The chunks of a file of rows (see `file_records`); raises DataError by file and line."""
    if not path.is_file():
        raise ConfigError(f"`chunks` {path}: no such file", hint="`chunks=FILE`")
    form = 'one {"text": "..."} or {"tokens": [...]} a line'
    chunks = []
    for record in file_records(path):
        values = record.values()
        with reading(str(record.source), wrong=form, kind=DataError, lower=True):
            found = _Line.model_validate(values)
        chunks.append(Chunk(found.text, found.tokens, document=found.document))
    if not chunks:
        raise DataError(f"{path}: no chunks", hint=form)
    return chunks


def warm_tiers(config: WarmConfig, dtype: str, out: TextIO) -> int:
    """Compile chunks and store them in tiers; prints what each tier got, returns 0.

    Raises EngineError if a chunk was refused everywhere: it is then compiled when it is needed.
    """
    chunks = read_chunks(Path(config.chunks))
    probe_tiers(config.tiers)
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
    table = Table("tier", "stored now", "bytes stored", "refused", "failures")
    for name, tier in found.items():
        done = (tier.stored, tier.bytes_written, tier.refused, tier.failures)
        table.add_row(name, *map(str, done))
    PipedConsole(file=out).print(table)
    print(f"{kept - short} of {len(chunks)} chunks are in tiers", file=out)
    if short:
        what = "have nothing to store: requests recompute all of their tokens"
        print(f"{short} of {len(chunks)} chunks {what} under {config.algo}", file=out)
    if kept < len(chunks):
        raise EngineError(
            f"{len(chunks) - kept} of {len(chunks)} chunks were not stored",
            hint="give `tiers` more room, or see the warnings above",
        )
    return 0
