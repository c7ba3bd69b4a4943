"""The settings of `picbench traffic`, and the request file that it writes."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from picbench.errors import ConfigError
from picbench.inputs.workload import reply_tokens
from picbench.run.config import parse_settings
from picbench.workloads import models
from picbench.workloads.traffic.chunk_source import ChunkSource, build
from picbench.workloads.traffic.draw import draw
from picbench.workloads.traffic.file import Header, write_requests
from picbench.workloads.traffic.settings import Traffic
from picbench.workloads.traffic.traffic_facts import TrafficFacts, measure


class TrafficConfig(BaseModel):
    """The settings of a request file; each field is an option of `picbench traffic`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    requests: int = 100
    seed: int = 0
    dataset: str = "musique"
    data: str = "bundled"
    pool: int = 64
    join: int = 1
    chunk_tokens: int = 0
    passages: int = 8
    questions: int = 6
    max_tokens: int | None = None
    chunks: str | None = None
    zipf: float = 0.0
    cached: float | None = None
    users: int | None = None
    rate: float | None = None
    arrivals: Literal["poisson", "uniform"] = "poisson"

    def source(self, model: models.ModelSpec) -> ChunkSource:
        """Where chunks and questions come from; the length of replies may be the model's."""
        return ChunkSource(
            dataset=self.dataset,
            data=self.data,
            pool=self.pool,
            join=self.join,
            chunk_tokens=self.chunk_tokens,
            passages=self.passages,
            questions=self.questions,
            max_tokens=self.max_tokens or reply_tokens(self.dataset, model),
        )

    def traffic(self) -> Traffic:
        """How requests are drawn from it."""
        return Traffic(
            requests=self.requests,
            seed=self.seed,
            chunks=_span(self.chunks),
            zipf=self.zipf,
            cached=self.cached,
            users=self.users,
            rate=self.rate,
            process=self.arrivals,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """A request file that was written, and what is in it."""

    fingerprint: str
    facts: TrafficFacts


def parse_traffic(values: Mapping[str, Any]) -> TrafficConfig:
    """Check raw values; ConfigError names the first that is wrong."""
    return parse_settings(TrafficConfig, values, command="picbench traffic")


def write_traffic(path: Path, config: TrafficConfig, model: models.ModelSpec) -> Written:
    """Draw the requests and write them; ConfigError or DataError where that cannot be."""
    source, traffic = config.source(model), config.traffic()
    stream = draw(traffic, build(source, models.load_tokenizer(model), traffic.seed))
    header = Header(
        dataset=source.dataset,
        synthetic=source.synthetic,
        settings={"model": model.name, "source": asdict(source), "traffic": asdict(traffic)},
    )
    return Written(write_requests(path, header, stream), measure(stream))


def _span(text: str | None) -> tuple[int, int] | None:
    """Read ``8`` or ``4-12``."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ConfigError(f"`chunks` {text!r} is no number of chunks", hint="write 8 or 4-12")
    return int(found[1]), int(found[2] or found[1])
