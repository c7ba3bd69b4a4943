"""Completes the arguments of an engine that asks for `pic` with what their user did not give.

Upstream: `EngineArgs` of vllm/engine/arg_utils.py of vLLM 0.32.0. `create_engine_config` (:2205) is
extended, through which servers, `vllm.LLM` and `AsyncLLM` get their configuration, in each process
that has a frontend; and `from_cli_args` (:1933), where commands make arguments of their flags.
`plugin.py` calls what is here.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from picbench.engines.chunk_cache.tiers.notation import refuse_passwords
from picbench.engines.vllm.compat import (
    check_config,
    check_signature,
    check_version,
    read_settings,
    text_only,
)
from picbench.engines.vllm.device import CPU, find, pool_gib, reserve_cores
from picbench.engines.vllm.long_rope import LONG
from picbench.engines.vllm.settings import (
    ASYNC_SCHEDULER,
    CHECKED,
    CPU_WORKER,
    KEY,
    SCHEDULER,
    PicSettings,
    engine_arguments,
)
from picbench.errors import ConfigError, PicBenchError

#: vLLM's server shows what its own loggers say.
_LOG = logging.getLogger("vllm.picbench")

#: What the model decides where it is not given.
_OF_MODEL = ("pad_token", "bos_token", "link_tokens")

#: Forms of quantised weights that agreed with stock vLLM on a GPU (`picbench list models`):
#: those of compressed-tensors, and vLLM's names of others.
_CHECKED_WEIGHTS = (
    *("float-quantized", "int-quantized", "pack-quantized"),
    *("awq", "awq_marlin", "gptq", "gptq_marlin"),
)

#: How a model's frequencies are divided among rows of positions: time, height and width.
_SECTIONS = ("mrope_section", "mrope_interleaved")


def create(upstream: Callable[..., Any], args: Any, *given: Any, **named: Any) -> Any:
    """The `VllmConfig` that `upstream` makes of completed `EngineArgs`, for an engine of picbench.

    Raises ConfigError as `complete`, `check_config` and `read_settings`: before a process is
    started, as of a refusal in an engine's own processes this one only says that they failed.
    """
    complete(args)
    check_signature(upstream, "self, usage_context, headless")
    from picbench.engines.vllm.frontend.patches import extend_frontend

    extend_frontend()
    config = upstream(args, *given, **named)
    _complete_config(config, args)
    check_config(config)
    read_settings(config)
    config.additional_config[CHECKED] = True
    return config


def complete_command(args: Any, command: Any) -> None:
    """Complete the `EngineArgs` of a command's flags, and its server's if no part was named.

    `command` are all flags, as argparse has them. What is refused ends the command with one line.
    """
    try:
        filled = complete(args)
        settings = PicSettings(**args.additional_config[KEY] or {})
        refuse_passwords(settings.tiers or "")
    except PicBenchError as error:
        raise SystemExit(f"picbench: {_with_flags(str(error), args)}") from None
    if args.worker_cls == CPU_WORKER:
        # Of vLLM's sampler one function would be compiled by the first request with logprobs.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "worker_cls" in filled and hasattr(command, "enable_prompt_tokens_details"):
        command.enable_prompt_tokens_details = True
        missing = (name for name in settings.middleware if name not in command.middleware)
        command.middleware = [*command.middleware, *missing]


def complete(args: Any) -> tuple[str, ...]:
    """Set what a PIC engine needs in `EngineArgs`; the names of what was not given.

    Raises ConfigError for another release of vLLM, wrong settings, and what contradicts picbench.
    """
    check_version()
    settings = PicSettings.given(args.additional_config)
    if settings is None:
        hint = """`additional_config` '{"pic": {}}' is enough, the rest is filled in"""
        raise ConfigError("a part of picbench is named, but no settings of it", hint=hint)
    settings.check()
    device = find("auto").name
    ahead = args.async_scheduling is not False and args.scheduler_cls != SCHEDULER
    wanted = engine_arguments(settings, device, asynchronous=ahead)
    if args.scheduler_cls is None and ahead and device != CPU.name:
        # vLLM decides, by its executor, whether steps are scheduled ahead: `_complete_config`.
        del wanted["scheduler_cls"], wanted["async_scheduling"]
    if device == CPU.name:
        wanted["enforce_eager"] = True
    filled = tuple(_missing(args, wanted))
    for name in filled:
        setattr(args, name, wanted[name])
    args.additional_config = dict(args.additional_config)
    if filled:
        _LOG.info("picbench sets %s", ", ".join(f"{name}={getattr(args, name)}" for name in filled))
    return filled


def _missing(args: Any, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of arguments that were not given; ConfigError for what is given otherwise."""
    for name, value in wanted.items():
        if name == "additional_config":
            continue
        given, ours = getattr(args, name), value
        if name == "kv_transfer_config":
            given, ours = _connector(given), _connector(value)
        elif name == "attention_backend":
            given = given or args.attention_config.backend
            given = getattr(given, "name", given)
        # vLLM does not tell whether False was given.
        if given is None or given == "auto" or (name == "enforce_eager" and not given):
            yield name
        elif given != ours:
            hint = "leave it out, or leave 'pic' out of `additional_config`"
            raise ConfigError(f"`{name}` is {given}, and picbench needs {ours}", hint=hint)


def _connector(transfer: Any) -> Any:
    if isinstance(transfer, Mapping):
        return transfer.get("kv_connector")
    return getattr(transfer, "kv_connector", None)


def _complete_config(config: Any, args: Any) -> None:
    """Set what is known once vLLM has read the model and chosen its executor."""
    scheduler, cache = config.scheduler_config, config.cache_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    given = config.additional_config[KEY] or {}
    _complete_model(config.model_config, given.get("positions"))
    if (weights := _unchecked_weights(config.model_config)) is not None:
        _LOG.warning("picbench was not checked with %s weights: picbench list models", weights)
    model = config.model_config.hf_text_config.to_dict()
    found = PicSettings.of_model(model)
    config.additional_config[KEY] = {name: getattr(found, name) for name in _OF_MODEL} | given
    if config.device_config.device_type != CPU.name:
        return
    reserve_cores(config)
    # A share that differs from vLLM's own was given.
    share = type(args).gpu_memory_utilization
    if cache.kv_cache_memory_bytes is None and args.gpu_memory_utilization == share:
        size = pool_gib(model, config.model_config.max_model_len)
        cache.kv_cache_memory_bytes = size << 30
        _LOG.info("picbench takes %d GiB for KV, not %s of the memory", size, share)


def _complete_model(model: Any, positions: int | None) -> None:
    """Leave a language model its text, and one rotation for all keys where it has several.

    Of text alone the rows of positions (time, height, width) are the same, by which a model that
    divides its frequencies among them rotates as one that does not. vLLM has all engines with a KV
    connector take embeddings of images, in case another one computed them
    (vllm/config/vllm.py:2768).
    """
    rope = model.hf_text_config.rope_parameters or {}
    if text_only(model):
        media = model.multimodal_config
        media.enable_mm_embeds = media.allow_missing_mm_embeddings = False
        for name in _SECTIONS:
            rope.pop(name, None)
    if "long_factor" in rope:
        # Slots are more than positions, so that `max_model_len` says nothing.
        longest = positions or model.max_model_len
        rope[LONG] = longest > rope["original_max_position_embeddings"]


def _unchecked_weights(model: Any) -> str | None:
    """The form of quantised weights that no check has passed with, as checkpoints call it."""
    if model.quantization is None:
        return None
    given = getattr(model.hf_config, "quantization_config", None) or {}
    groups = (group.get("weights") or {} for group in (given.get("config_groups") or {}).values())
    in_blocks = any(weights.get("strategy") == "block" for weights in groups)
    form = str(given.get("format") or model.quantization)
    if in_blocks or given.get("weight_block_size"):
        return f"{form} (in blocks)"
    return None if form in _CHECKED_WEIGHTS else form


def _with_flags(text: str, args: Any) -> str:
    """A message in which fields of `EngineArgs` in backticks are flags."""

    def flag(found: re.Match[str]) -> str:
        name = found[1]
        return f"--{name.replace('_', '-')}" if hasattr(args, name) else name

    return re.sub(r"`(\w+)`", flag, text)
