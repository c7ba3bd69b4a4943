"""Arguments of engines that ask for `pic`, as vLLM's servers and its Python interface make them."""

import json
import shlex
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from server_arguments import make_arg_parser
from serving_document import refused_at_start
from vllm.config import AttentionConfig, CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from picbench.engines.vllm import compat
from picbench.engines.vllm.device import CUDA
from picbench.engines.vllm.frontend import engine_args
from picbench.engines.vllm.frontend.engine_args import complete
from picbench.engines.vllm.frontend.plugin import register
from picbench.engines.vllm.settings import (
    ASYNC_SCHEDULER,
    CACHE_MIDDLEWARE,
    CONNECTOR,
    CPU_WORKER,
    CUDA_WORKER,
    MIDDLEWARE,
    SCHEDULER,
    USAGE_MIDDLEWARE,
    PicSettings,
    engine_arguments,
)
from picbench.errors import ConfigError
from picbench.workloads.testbed import model_path

MODEL = str(model_path())
SPACE = "VLLM_CPU_KVCACHE_SPACE"
#: What is set in the environment.
VARIABLES = (SPACE, "VLLM_CPU_NUM_OF_RESERVED_CPU", "TORCHDYNAMO_DISABLE")


@pytest.fixture(autouse=True)
def plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    for name in VARIABLES:
        # Set first, so that what a test sets is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "find", lambda name: CUDA)


def arguments(kind: Any = EngineArgs, pic: Any = None, **given: Any) -> Any:
    sizes = {"dtype": "float32", "max_model_len": 512}
    return kind(MODEL, additional_config={"pic": pic}, **sizes, **given)


def parts(config: Any) -> dict[str, Any]:
    """What is picbench's in a configuration."""
    return {
        "scheduler": config.scheduler_config.scheduler_cls,
        "worker": config.parallel_config.worker_cls,
        "ahead": config.scheduler_config.async_scheduling,
        "block": config.cache_config.block_size,
        "caching": config.cache_config.enable_prefix_caching,
        "connector": config.kv_transfer_config.kv_connector_module_path,
        "loads": config.kv_transfer_config.kv_load_failure_policy,
    }


def command(*flags: str) -> Namespace:
    """Flags of vLLM's server, as it parses them."""
    words = ["--model", MODEL, "--dtype", "float32", *flags]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_settings_are_enough(kind: Any) -> None:
    config = arguments(kind).create_engine_config()
    whole = EngineArgs(MODEL, dtype="float32", **engine_arguments(PicSettings(), "cpu"))
    assert parts(config) == parts(whole.create_engine_config())
    # Compiled models would be wrong on a CPU.
    assert config.model_config.enforce_eager
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.cache_config.kv_cache_memory_bytes == 1 << 30
    found = config.additional_config["pic"]
    assert found.keys() == {"pad_token", "bos_token", "link_tokens", "anchors"}
    assert (found["pad_token"], found["bos_token"], found["link_tokens"]) == (2, 0, ())


def test_what_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"pad_token": 7, "algorithm": "naive", "tiers": ""}
    whole = engine_arguments(PicSettings(), "cpu")
    asked = EngineArgs(
        MODEL, enforce_eager=True, **whole | {"additional_config": {"pic": given, "other": 1}}
    )
    assert complete(asked) == ()
    config = asked.create_engine_config()
    found = config.additional_config["pic"]
    assert found == {**given, "bos_token": 0, "link_tokens": (), "anchors": found["anchors"]}
    assert config.additional_config["other"] == 1
    assert given == {"pad_token": 7, "algorithm": "naive", "tiers": ""}
    monkeypatch.setenv(SPACE, "3")
    config = arguments().create_engine_config()
    assert config.cache_config.kv_cache_memory_bytes == 3 << 30


def test_a_share_of_the_memory_stays() -> None:
    config = arguments(gpu_memory_utilization=0.5).create_engine_config()
    assert config.cache_config.kv_cache_memory_bytes is None


def test_steps_are_scheduled_ahead_where_vllm_does(gpu: None) -> None:
    asked = arguments()
    assert "attention_backend" in complete(asked)
    assert (asked.worker_cls, asked.attention_backend) == (CUDA_WORKER, "CUSTOM")
    assert (asked.scheduler_cls, asked.async_scheduling) == (None, None)
    for ahead, expected in ((True, ASYNC_SCHEDULER), (False, SCHEDULER)):
        scheduler = SimpleNamespace(scheduler_cls=None, async_scheduling=ahead)
        text = SimpleNamespace(to_dict=dict, rope_parameters=None)
        model = SimpleNamespace(hf_text_config=text, multimodal_config=None, quantization=None)
        config = SimpleNamespace(
            scheduler_config=scheduler,
            cache_config=None,
            model_config=model,
            additional_config={"pic": {}},
            device_config=SimpleNamespace(device_type="cuda"),
        )
        engine_args._complete_config(config, asked)
        assert scheduler.scheduler_cls == expected


@pytest.mark.parametrize(
    ("given", "scheduler", "ahead"),
    [
        ({"async_scheduling": False}, SCHEDULER, False),
        ({"async_scheduling": True}, None, True),
        ({"scheduler_cls": SCHEDULER}, SCHEDULER, False),
        ({"scheduler_cls": ASYNC_SCHEDULER}, ASYNC_SCHEDULER, True),
        ({"attention_config": {"backend": "CUSTOM"}}, None, None),
    ],
)
def test_on_a_gpu_either_scheduler_can_be_given(
    gpu: None, given: dict[str, Any], scheduler: str | None, ahead: bool | None
) -> None:
    asked = arguments(**given)
    complete(asked)
    assert (asked.scheduler_cls, asked.async_scheduling) == (scheduler, ahead)
    assert asked.attention_backend == (None if "attention_config" in given else "CUSTOM")


@pytest.mark.parametrize(
    "given",
    [
        {"scheduler_cls": ASYNC_SCHEDULER, "async_scheduling": False},
        {"scheduler_cls": SCHEDULER, "async_scheduling": True},
        {"attention_backend": "FLASH_ATTN"},
        {"attention_config": AttentionConfig(backend="TRITON_ATTN")},
        {"worker_cls": CPU_WORKER},
    ],
)
def test_what_contradicts_on_a_gpu(gpu: None, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^`\w+` is .*, and picbench needs .*leave it out"):
        complete(arguments(**given))


@pytest.mark.parametrize(("flags", "line"), refused_at_start())
def test_flags_that_contradict_end_the_command_with_one_line(flags: str, line: str) -> None:
    asked = command("--additional-config", '{"pic": {}}', *shlex.split(flags))
    with pytest.raises(SystemExit) as caught:
        AsyncEngineArgs.from_cli_args(asked)
    said = str(caught.value)
    assert said.startswith(f"picbench: {line}")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("pic", "reason"),
    [({"algorthm": "mepic"}, "unknown field 'algorthm'"), ({"algorithm": "mepik"}, "'mepic'")],
)
def test_wrong_settings_end_the_command(pic: Any, reason: str) -> None:
    with pytest.raises(SystemExit, match=f"^picbench: .*{reason}"):
        AsyncEngineArgs.from_cli_args(command("--additional-config", json.dumps({"pic": pic})))


def test_parts_without_settings_are_refused() -> None:
    for given in ({"scheduler_cls": SCHEDULER}, {"worker_cls": CPU_WORKER}):
        with pytest.raises(ConfigError, match="no settings of it"):
            EngineArgs(MODEL, **given).create_engine_config()  # type: ignore[arg-type]


def test_commands_show_what_is_cached_and_read_parts() -> None:
    asked = command("--additional-config", '{"pic": {"marks": true}}', "--middleware", "a.b")
    made = AsyncEngineArgs.from_cli_args(asked)
    assert made.kv_transfer_config is not None
    assert made.kv_transfer_config.kv_connector == CONNECTOR
    assert asked.enable_prompt_tokens_details
    assert asked.middleware == ["a.b", USAGE_MIDDLEWARE, CACHE_MIDDLEWARE, MIDDLEWARE]
    # Of a command with all parts, as `picbench serve` makes it, nothing is changed.
    asked = command("--additional-config", '{"pic": {}}', "--worker-cls", CPU_WORKER)
    AsyncEngineArgs.from_cli_args(asked)
    assert not asked.enable_prompt_tokens_details
    asked = command()
    AsyncEngineArgs.from_cli_args(asked)
    assert not asked.enable_prompt_tokens_details


def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "RELEASES", ("0.34.0",))
    with pytest.raises(SystemExit, match=r"^picbench: .* needs vLLM 0\.34\.0, found 0\.3[23]\.0"):
        AsyncEngineArgs.from_cli_args(command("--additional-config", '{"pic": {}}'))
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.34\.0"):
        arguments().create_engine_config()


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"enable_lora": True}, "LoRA"), ({"kv_cache_dtype": "fp8"}, "quantised KV")],
)
def test_what_is_not_supported_is_refused_before_a_process_is_started(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        arguments(**given).create_engine_config()


LONG_ROPE = {"long_factor": [2.0], "short_factor": [1.0], "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("positions", "long"), [(None, True), (4096, False), (4097, True)], ids=str
)
def test_the_longest_prompt_chooses_frequencies_and_not_the_slots(
    positions: int | None, long: bool
) -> None:
    text = SimpleNamespace(rope_parameters=dict(LONG_ROPE))
    model = SimpleNamespace(hf_text_config=text, multimodal_config=None, max_model_len=9216)
    engine_args._complete_model(model, positions)
    assert text.rope_parameters == {**LONG_ROPE, "picbench_long": long}


def test_text_alone_has_one_row_of_positions_and_no_embeddings_of_images() -> None:
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "mrope_interleaved": True}
    for alone in (True, False):
        text = SimpleNamespace(rope_parameters=dict(rope))
        media = SimpleNamespace(
            language_model_only=alone, enable_mm_embeds=True, allow_missing_mm_embeddings=True
        )
        model = SimpleNamespace(hf_text_config=text, multimodal_config=media)
        engine_args._complete_model(model, None)
        assert text.rope_parameters == ({"rope_type": "default"} if alone else rope)
        assert media.enable_mm_embeds is media.allow_missing_mm_embeddings is (not alone)


@pytest.mark.parametrize(
    ("quantization", "given", "said"),
    [
        (None, None, None),
        ("gptq_marlin", {"quant_method": "gptq"}, None),
        ("compressed-tensors", {"format": "pack-quantized"}, None),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (
            "compressed-tensors",
            {
                "format": "float-quantized",
                "config_groups": {"0": {"weights": {"strategy": "block"}}},
            },
            "float-quantized (in blocks)",
        ),
        ("fp8", {"weight_block_size": [128, 128]}, "fp8 (in blocks)"),
        ("mxfp4", {"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_weights_that_no_check_passed_with_are_named(
    quantization: str | None, given: dict[str, Any] | None, said: str | None
) -> None:
    model = SimpleNamespace(
        quantization=quantization, hf_config=SimpleNamespace(quantization_config=given)
    )
    assert engine_args._unchecked_weights(model) == said
