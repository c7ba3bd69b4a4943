"""Compiling chunks into tiers that other engines read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from rich.table import Table

from picbench.engines.config import EngineConfig
from picbench.engines.request import Chunk, Text
from picbench.errors import ConfigError, DataError, EngineError, first_refusal
from picbench.settings import SettingsModel, setting
from picbench.store.provenance import quiet_engine
from picbench.tables.table import PipedConsole
from picbench.workloads import models
from picbench.workloads.sources.records import Record, file_records

if TYPE_CHECKING:
    from picbench.engines.cache import TierInfo


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
