"""The settings of a PIC engine, which every process of vLLM gets in `additional_config`.

vLLM hashes `additional_config` into the key of its compile cache, so no artifact compiled for stock
vLLM is used in a PIC engine (vllm/config/vllm.py, compute_hash).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from picbench.engines.algorithms import Algorithm, check_served, parse, temperatures
from picbench.engines.chunk_cache.tiers.notation import parse_tiers
from picbench.engines.config import BLOCK_SIZE, DEFAULT_TIERS, ChunkSettings, Natural
from picbench.engines.planning.policy import LayoutConfig
from picbench.engines.vllm.marks import DocumentMarks
from picbench.engines.vllm.parts import read_kinds
from picbench.errors import ConfigError, first_refusal

#: The key of the settings in `additional_config`.
KEY = "pic"

#: The key beside it that the plug-in sets in the process that has checked the engine's arguments.
CHECKED = "pic_checked"

SCHEDULER = "picbench.engines.vllm.scheduler.scheduler.PicScheduler"
ASYNC_SCHEDULER = "picbench.engines.vllm.scheduler.scheduler.PicAsyncScheduler"
CPU_WORKER = "picbench.engines.vllm.worker.cpu.worker.PicCPUWorker"
CUDA_WORKER = "picbench.engines.vllm.worker.cuda.worker.PicGPUWorker"
WORKERS = (CPU_WORKER, CUDA_WORKER)
CONNECTOR = "PicConnector"
CONNECTOR_MODULE = "picbench.engines.vllm.transfer.connector"

#: What reads documents in parts of messages, for vLLM's flag of that name.
MIDDLEWARE = "picbench.engines.vllm.frontend.document_parts.DocumentParts"
USAGE_MIDDLEWARE = "picbench.engines.vllm.frontend.usage.UsageMiddleware"
CACHE_MIDDLEWARE = "picbench.engines.vllm.frontend.cache_api.CacheMiddleware"

#: vLLM's stop reason of a request that `on_pressure` refused.
REJECTED = "rejected: the KV pool is short of blocks"

#: What samples given replies, and their key in a request's `extra_args`.
FORCED_TOKENS = "picbench.engines.vllm.forced_tokens:ForcedTokens"
REPLY = "picbench_reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class PicSettings(ChunkSettings):
    """Settings of a PIC engine: those that are given, and what its model decides.

    `pad_token` fills visible pads (``pad=paper``), `bos_token` (None: the model has none) the
    anchors of ``epic:k=0``; `link_tokens` are those that the model was trained to link chunks with
    (``kvlink``). `positions` are those that the model has, where a request has room for more slots
    (None: max_model_len). `marks` around documents in prompts are read by servers: true for the
    default pair, or a pair (see `DocumentMarks`), and `parts` of messages are put between them (see
    `KINDS`) where the server has the middleware. With `usage` every answer says what became of its
    prompt, unless its request does not want that. With `salts` clients of a server share KV only
    with those of the same API key (None: if it has several). `on` gives engines of a device its
    default tiers.
    """

    pad_token: Natural = 0
    bos_token: Natural | None = None
    link_tokens: Sequence[Natural] = ()
    positions: Natural | None = None
    marks: Any = None
    parts: Sequence[str] = ("documents",)
    usage: bool = False
    salts: bool | None = None

    @classmethod
    def read(cls, additional_config: Any) -> "PicSettings | None":
        """The checked settings in an engine's `additional_config`; None in a stock engine.

        Raises ConfigError for unknown fields, algorithms and tiers, and as `check`.
        """
        settings = cls.given(additional_config)
        if settings is not None:
            settings.check()
        return settings

    @classmethod
    def given(cls, additional_config: Any) -> "PicSettings | None":
        """The settings without checking their values: cheap enough for each request.

        Raises ConfigError for unknown fields, and for what is no mapping.
        """
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        given = additional_config[KEY] or {}
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional_config[{KEY!r}] is {given!r}, not a mapping",
                hint='give fields, as in {"algorithm": "mepic"}',
            )
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known, key=str):
            hint = "known fields: " + ", ".join(sorted(known))
            raise ConfigError(
                f"additional_config[{KEY!r}]: unknown field {unknown[0]!r}", hint=hint
            )
        return cls(**given)

    @classmethod
    def of_model(cls, model: Mapping[str, Any], **given: Any) -> Self:
        """The `given` settings, with what a model's configuration decides."""
        pad, bos = model.get("pad_token_id"), model.get("bos_token_id")
        if isinstance(bos, list):
            bos = bos[0] if bos else None
        # Some models' configurations have -1 where there is none.
        return cls(
            **given,
            pad_token=pad if pad is not None and pad >= 0 else 0,
            bos_token=None if bos is None or bos < 0 else int(bos),
            link_tokens=tuple(model.get("link_token_ids") or ()),
        )

    def on(self, device: str) -> Self:
        """The settings on a device, cpu or cuda: with its default tiers where none are given."""
        return replace(self, tiers=DEFAULT_TIERS[device]) if self.tiers is None else self

    def check(self) -> None:
        """Raise ConfigError for a wrong algorithm, tier, or word, and for values of other types."""
        DocumentMarks.of(self.marks)
        read_kinds(self.parts)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            _schema().model_validate(given)
        except ValidationError as error:
            first = first_refusal(error, lower=True)
            name = str(first.path[0])
            raise ConfigError(f"`{name}` is {given[name]!r}: {first.message}") from error
        check_served(parse(self.algorithm))
        if self.keys_without_rope and self.temperatures_served:
            hint = "leave `keys_without_rope` or the temperature out"
            raise ConfigError("`keys_without_rope` has no temperatures", hint=hint)
        parse_tiers(self.tiers or "")

    @property
    def middleware(self) -> tuple[str, ...]:
        """What servers need for `usage`, the cache API and, with `marks`, for `parts`."""
        return (USAGE_MIDDLEWARE, CACHE_MIDDLEWARE, *([MIDDLEWARE] if self.marks else []))

    @property
    def shares_tiers(self) -> bool:
        """Whether other engines may store chunks in one of the tiers."""
        return any(spec.kind != "host" for spec in parse_tiers(self.tiers or ""))

    @property
    def temperatures_served(self) -> tuple[float, ...]:
        """All temperatures but 1 that requests may name."""
        return _served(self.algorithm, tuple(map(float, self.temperatures)))

    def layout(self, algorithm: Algorithm, salt: str | None, block_size: int) -> LayoutConfig:
        """The layout of one tenant's prompts under an algorithm.

        Raises ConfigError for a temperature that the engine was not started with.
        """
        layout = algorithm.layout(
            block_size=block_size,
            scope=salt or "",
            pad_token=self.pad_token,
            bos_token=self.bos_token,
            link_tokens=tuple(self.link_tokens),
            anchors=self.anchors,
        )
        if layout.temperature not in (1, *self.temperatures_served):
            raise ConfigError(
                f"the engine was not started with temperature={layout.temperature}",
                hint="start it with an algorithm that has it, or name it in `temperatures`",
            )
        return layout


@cache
def _schema() -> type[BaseModel]:
    hints = get_type_hints(PicSettings, include_extras=True)
    given: Any = {name: (hint, ...) for name, hint in hints.items()}
    return create_model("Pic", __config__=ConfigDict(strict=True, allow_inf_nan=False), **given)


@lru_cache
def _served(algorithm: str, others: tuple[float, ...]) -> tuple[float, ...]:
    # Parsing takes milliseconds, and this is asked for each request.
    return tuple(sorted({*temperatures([parse(algorithm)]), *others} - {1.0}))


def engine_arguments(
    settings: PicSettings, device: str = "cpu", *, asynchronous: bool = True
) -> dict[str, Any]:
    """Arguments that make `vllm.LLM` a PIC engine on a device, cpu or cuda: `plain_arguments`."""
    from vllm.config import KVTransferConfig

    found = plain_arguments(settings, device, asynchronous=asynchronous)
    return found | {"kv_transfer_config": KVTransferConfig(**found["kv_transfer_config"])}


def plain_arguments(
    settings: PicSettings, device: str, *, asynchronous: bool = True
) -> dict[str, Any]:
    """Arguments that make an engine of vLLM a PIC engine, as JSON has them; vLLM is not imported.

    On CUDA `asynchronous` engines schedule a step while the previous one runs. A failed load does
    not fail its request: the chunks are then compiled.
    """
    cuda = device == "cuda"
    asynchronous = asynchronous and cuda
    arguments = {
        "scheduler_cls": ASYNC_SCHEDULER if asynchronous else SCHEDULER,
        "worker_cls": CUDA_WORKER if cuda else CPU_WORKER,
        "async_scheduling": asynchronous,
        "additional_config": {KEY: asdict(settings.on(device))},
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
    }
    return arguments | {"attention_backend": "CUSTOM"} if cuda else arguments
