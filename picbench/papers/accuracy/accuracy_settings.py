"""What is measured of trained models, what is claimed, and which gaps were published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from picbench.errors import ConfigError
from picbench.papers.judging.claim import Claim
from picbench.papers.paper_settings import FILES, StrictSettings, arm_names, read_yaml

NAME = "accuracy"


class EngineSize(StrictSettings):
    """The pool of an engine in blocks of 16 tokens, how many requests run at a time, its type."""

    kv_blocks: int = Field(ge=1024)
    max_requests: int = Field(ge=1)
    dtype: Literal["float32", "bfloat16"]


class TokenSpeed(StrictSettings):
    """Tokens a second of all arms in one batch."""

    prompt: float = Field(gt=0)
    reply: float = Field(gt=0)


class PublishedGap(StrictSettings):
    """Scores that a source printed, in points: the lowest and the highest one.

    `dataset` is the data set here that they may be set beside.
    """

    source: str
    model: str
    rows: str
    full: tuple[float, float]
    arms: dict[str, tuple[float, float]] = Field(min_length=1)
    dataset: str = ""

    def gap(self, arm: str) -> tuple[float, float]:
        """What an arm loses or gains against full recompute, in points, at worst and at best."""
        low, high = self.arms[arm]
        return low - self.full[1], high - self.full[0]

    def kept(self, arm: str) -> tuple[float, float]:
        """What an arm keeps of full recompute's score, in percent, at worst and at best."""
        low, high = self.arms[arm]
        return 100 * low / self.full[1], 100 * high / self.full[0]


class AccuracySettings(StrictSettings):
    """Models, data sets and arms; sizes by device; claims, and published gaps.

    Prompts above `longest` tokens, reply included, lose their middle. `drawn` are the arms of the
    figure. `tokens` (by source and data set) and `speeds` (by device) are for estimates.
    """

    models: list[str] = Field(min_length=1)
    datasets: list[str] = Field(min_length=1)
    rows: int = Field(ge=2)
    longest: int = Field(ge=1024)
    arms: list[str] = Field(min_length=2)
    drawn: list[str]
    engines: Mapping[Literal["cpu", "cuda"], EngineSize]
    tokens: Mapping[Literal["bundled", "hub"], Mapping[str, int]]
    speeds: Mapping[Literal["cpu", "cuda"], TokenSpeed]
    claims: list[Claim]
    gaps: list[PublishedGap]


def read_accuracy(path: Path | None = None) -> AccuracySettings:
    """The settings that come with picbench, or a file's; ConfigError for mistakes in them."""
    path = path or FILES / f"{NAME}.yaml"
    found = read_yaml(AccuracySettings, path)
    arm_names(found.arms)
    missing = [arm for arm in found.drawn if arm not in found.arms]
    if missing:
        raise ConfigError(f"`settings` {path}: drawn: {missing[0]} is not among `arms`")
    return found
