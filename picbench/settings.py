"""The settings of `picbench run`, checked."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picbench.engines.chunk_cache.tiers.kinds import without_credentials
from picbench.errors import ConfigError, first_refusal

Config = TypeVar("Config", bound=BaseModel)


class RunConfig(BaseModel):
    """The settings of one run; each field is an option of `picbench run`.

    None leaves the choice to picbench: all rows, the data set's output length, a context of the
    longest request, a pool that holds the whole workload or as much of it as the GPU has room for,
    the device's default tiers, a new folder below ``runs``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    algo: tuple[str, ...] = Field(min_length=1)
    dataset: str = ""
    requests: str | None = None
    data: str = Field(default="bundled", min_length=1)
    columns: str | None = Field(None, min_length=1)
    model: str = Field("testbed", min_length=1)
    limit: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=1 << 32)  # What vLLM takes.
    concurrency: int = Field(4, ge=1)
    rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    arrivals: Literal["poisson", "uniform"] = "poisson"
    max_running: int = Field(64, ge=1)
    slo: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    kv_blocks: int | None = Field(None, ge=1)
    tiers: str | None = None
    on_pressure: Literal["wait", "reject"] = "wait"
    compile_order: Literal["head", "batch", "isps"] = "head"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel: int = Field(1, ge=1)
    eager: bool = False
    keys_without_rope: bool = False
    shared_decode: Literal["off", "auto", "always"] = "auto"
    context: int | None = Field(None, ge=16)
    prompts: str | None = None
    output: str | None = None
    same_engine: bool = False
    on_bad_row: Literal["stop", "skip"] = "stop"
    offline: bool = False
    self_check: bool = False
    chat: Literal["auto", "on", "off"] = "auto"
    scoring: Literal["longbench", "cacheblend"] = "longbench"
    grid: str | None = None
    drop: Literal["lead"] | None = None
    arm: tuple[str, ...] = ()
    cache: Literal["cold", "warm", "steady"] | None = None
    repeats: int = Field(1, ge=1)

    def published(self) -> dict[str, Any]:
        """The settings as JSON values for files that are passed on: without passwords."""
        tiers = None if self.tiers is None else without_credentials(self.tiers)
        return self.model_dump(mode="json") | {"tiers": tiers}


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check raw values; ConfigError names the first that is wrong."""
    return parse_settings(RunConfig, values, command="picbench run")


def parse_settings(kind: type[Config], values: Mapping[str, Any], command: str) -> Config:
    """Check the settings of a command; ConfigError names the first that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = first_refusal(error, lower=True)
        raise ConfigError(
            f"`{first.path[0]}` {first.value!r}: {first.message}",
            hint=f"see {command} `help`",
        ) from error
