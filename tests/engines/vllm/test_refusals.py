"""What is refused: at start, on arrival, and in a process without picbench's parts."""

import json
import pickle
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

from picbench.engines.algorithms import Registry
from picbench.engines.algorithms.kvlink import KVLink
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.pace import Submission
from picbench.engines.planning.layout import Footprint
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm import compat
from picbench.engines.vllm.frontend import limits, patches
from picbench.engines.vllm.frontend.engine_args import complete
from picbench.engines.vllm.frontend.limits import Limits, check_request
from picbench.engines.vllm.launch import _settings, _start, launch
from picbench.engines.vllm.scheduler.scheduler import _checked
from picbench.engines.vllm.settings import (
    ASYNC_SCHEDULER,
    SCHEDULER,
    PicSettings,
    engine_arguments,
)
from picbench.engines.vllm.worker.cpu.worker import PicCPUWorker
from picbench.engines.vllm.worker.cuda.worker import PicGPUWorker
from picbench.errors import ConfigError, EngineError


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as the checks read, with one part changed."""
    parts = {
        "model_config": {
            "is_multimodal_model": False,
            "multimodal_config": None,
            "use_mla": False,
            "is_encoder_decoder": False,
            "runner_type": "generate",
        },
        "parallel_config": {
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "distributed_executor_backend": "uni",
            "data_parallel_size": 1,
        },
        "cache_config": {"block_size": 16, "enable_prefix_caching": True, "cache_dtype": "auto"},
        "scheduler_config": {"policy": "fcfs", "async_scheduling": False},
    }
    whole: dict[str, Any] = {"lora_config": None, "speculative_config": None}
    whole["watermark_config"] = None
    whole["aux_output_config"] = SimpleNamespace(enabled=False)
    whole["kv_transfer_config"] = SimpleNamespace(kv_connector="PicConnector")
    whole["additional_config"] = {}
    for name, value in changes.items():
        part = next((p for p in parts.values() if name in p), whole)
        part[name] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in parts.items()}, **whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"is_multimodal_model": True}, "images.*language_model_only"),
        ({"use_mla": True}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"runner_type": "pooling"}, "pooling"),
        ({"speculative_config": object()}, "speculative"),
        ({"decode_context_parallel_size": 2}, "decode context"),
        ({"prefill_context_parallel_size": 2}, "prefill context"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"distributed_executor_backend": "ray"}, "Ray's executor"),
        ({"data_parallel_size": 2}, "data parallel"),
        ({"watermark_config": object()}, "watermarking"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "expert choices"),
        ({"kv_transfer_config": None}, "KV connector is None"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="Other")}, "Other.*PicConnector"),
        ({"cache_dtype": "fp8"}, "quantised"),
        ({"block_size": 32}, "block_size is 32"),
        ({"enable_prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_unsupported_settings_are_named(change, message):
    compat.check_config(config())
    with pytest.raises(ConfigError, match=message):
        compat.check_config(config(**change))


def test_text_of_multimodal_models_is_served():
    text = SimpleNamespace(language_model_only=True)
    compat.check_config(config(is_multimodal_model=True, multimodal_config=text))
    other = SimpleNamespace(language_model_only=False)
    with pytest.raises(ConfigError, match="images"):
        compat.check_config(config(is_multimodal_model=True, multimodal_config=other))


def test_hybrid_models_are_refused():
    with pytest.raises(ConfigError, match="2 groups"):
        compat.check_kv_groups(2)


def test_another_signature_is_refused():
    def upstream(self: Any, request: Any, more: Any) -> None: ...

    with pytest.raises(ConfigError, match="upstream takes"):
        compat.check_signature(upstream, "self, request")


@pytest.mark.parametrize(
    "part",
    [
        lambda: complete(None),
        lambda: launch(EngineConfig(model="none")),
        lambda: _checked(None),
        lambda: PicCPUWorker.init_device(None),
        lambda: PicGPUWorker.init_device(None),
    ],
    ids=["plug-in", "engine", "scheduler", "CPU worker", "GPU worker"],
)
def test_another_version_is_refused_by_each_part(monkeypatch, part):
    """They may be started by others, and in processes of their own."""
    monkeypatch.setattr(compat, "RELEASES", ("0.34.0", "0.35.0"))
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.34\.0 or 0\.35\.0, found 0\.3[23]\.0"):
        part()


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="unknown field 'algorthm'"):
        PicSettings.read({"pic": {"algorthm": "mepic"}})
    with pytest.raises(ConfigError, match="did you mean 'mepic'"):
        PicSettings.read({"pic": {"algorithm": "mepik"}})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("mepic", r"additional_config\['pic'\] is 'mepic', not a mapping"),
        ([1], r"additional_config\['pic'\] is \[1\], not a mapping"),
        ({1: 2, "x": 3}, "unknown field 1"),
        ({"algorithm": 5}, "`algorithm` is 5"),
        ({"tiers": ["host:1GiB"]}, "`tiers` is "),
        ({"pad_token": "2"}, "`pad_token` is '2'"),
        ({"pad_token": -1}, "`pad_token` is -1"),
        ({"bos_token": True}, "`bos_token` is True"),
        ({"link_tokens": 5}, "`link_tokens` is 5"),
        ({"link_tokens": "12"}, "`link_tokens` is '12'"),
        ({"keys_without_rope": "no"}, "`keys_without_rope` is 'no'"),
        ({"positions": "x"}, "`positions` is 'x'"),
    ],
)
def test_settings_of_other_types_are_named(given, named):
    """By all processes that read them, and by servers before they start another."""
    with pytest.raises(ConfigError, match=named):
        PicSettings.read({"pic": given})
    asked = SimpleNamespace(additional_config={"pic": given})
    with pytest.raises(ConfigError, match=named):
        complete(asked)


def test_a_model_may_say_by_minus_one_that_it_has_no_pad():
    settings = _settings(
        EngineConfig(model="any"), {"pad_token_id": -1, "bos_token_id": -1}, context=64
    )
    settings.check()
    assert (settings.pad_token, settings.bos_token) == (0, None)


def test_no_step_is_scheduled_ahead_on_a_cpu():
    asked = config(additional_config={"pic": {}})
    asked.scheduler_config.scheduler_cls = ASYNC_SCHEDULER
    with pytest.raises(ConfigError, match=rf"scheduled ahead.*{SCHEDULER}"):
        PicCPUWorker.init_device(SimpleNamespace(vllm_config=asked))


class TestStart:
    """Half a PIC engine does not start."""

    def test_scheduler_without_settings(self, llama):
        ours = engine_arguments(PicSettings(tiers=""))
        some = {name: ours[name] for name in ("scheduler_cls", "kv_transfer_config")}
        with pytest.raises(ConfigError, match="no settings of it"):
            _start(self.arguments(llama) | some | {"block_size": 32}, {})

    @staticmethod
    def arguments(llama) -> dict[str, Any]:
        return {
            "model": str(llama),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 64 << 20,
            "async_scheduling": False,
        }

    def test_missing_and_broken_models(self, tmp_path):
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            Engine(EngineConfig(model=str(tmp_path)))
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="not JSON"):
            Engine(EngineConfig(model=str(tmp_path)))

    def test_a_pool_beyond_the_memory(self, llama):
        with pytest.raises(ConfigError, match=r"too little free memory.*`kv_blocks`"):
            Engine(EngineConfig(str(llama), kv_blocks=1 << 30))

    def test_a_worker_that_dies_is_one_line(self, llama, monkeypatch):
        def dying(arguments: Any) -> Any:
            raise Exception("WorkerProc initialization failed due to an exception\nSee stack trace")

        monkeypatch.setattr(LLMEngine, "from_engine_args", dying)
        with pytest.raises(EngineError, match="a worker of the engine could not start") as caught:
            Engine(EngineConfig(str(llama)))
        assert "\n" not in str(caught.value)

    def test_a_context_beyond_the_table_of_yarn(self, llama, tmp_path):
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
        given = json.loads((llama / "config.json").read_bytes()) | {"rope_parameters": yarn}
        (tmp_path / "config.json").write_text(json.dumps(given))
        with pytest.raises(ConfigError, match="longer than the model's 1024"):
            Engine(EngineConfig(model=str(tmp_path), context=1025))

    def test_a_context_beyond_the_model(self, llama):
        with pytest.raises(ConfigError, match="longer than the model's 8192"):
            Engine(EngineConfig(model=str(llama), context=9000))


def test_a_document_as_long_as_the_context(llama, draw):
    """Its compile would fill the context, where vLLM's users set that themselves."""
    settings = PicSettings(tiers="", algorithm="naive:context=document")
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 50, "max_num_batched_tokens": 64}
    arguments = {"model": str(llama), "dtype": "float32", "enforce_eager": True}
    arguments |= {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 28}
    engine = _start({**arguments, **sizes, **engine_arguments(settings)}, {})
    document = draw(128, 5)

    def add(end: int) -> None:
        """A request with the document's tokens from 96 up to `end` as its chunk."""
        pic = {"spans": [[0, end - 96]], "documents": [document[:end]]}
        params = SamplingParams(max_tokens=2, detokenize=False, extra_args={"pic": pic})
        prompt = {"prompt_token_ids": [*document[96:end], 7, 8]}
        engine.add_request(str(end), prompt, params)

    with pytest.raises(ValueError, match="need 129 KV slots with pads"):
        add(128)
    add(127)
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [output.request_id for output in outputs if output.finished] == ["127"]
    engine.engine_core.shutdown()


class TestArrival:
    """Requests that can never be served are refused before any is started."""

    @pytest.mark.parametrize(
        ("tokens", "max_tokens", "message"),
        [(0, 1, "no tokens"), (2040, 9, "exceed the context of 2048")],
    )
    def test_sizes(self, engine, draw, tokens, max_tokens, message):
        with pytest.raises(ConfigError, match=message):
            engine.generate([Request([Chunk(tokens=draw(tokens, 1))])], max_tokens=max_tokens)

    def test_more_blocks_than_the_pool_has(self, engine, inside, draw):
        """Chunks of one token take a block each."""
        chunks = [Chunk(tokens=draw(1, i)) for i in range(400)]
        with pytest.raises(ConfigError, match=r"has 300 \(raise `kv_blocks`\)$"):
            engine.generate([Request([*chunks, Text(tokens=(5,))], algorithm="naive")])
        assert inside.linker.idle

    def test_visible_pads_beyond_the_context(self, engine, inside, draw):
        """64 chunks of 17 tokens, each padded to 32 positions."""
        chunks = [Chunk(tokens=draw(17, i)) for i in range(64)]
        with pytest.raises(ConfigError, match="needs 2055 positions with pads"):
            engine.generate(
                [Request([*chunks, Text(tokens=draw(3, 1))], algorithm="mepic:pad=paper")],
                max_tokens=4,
            )
        assert inside.linker.idle

    def test_slots_longer_than_the_context(self, engine, draw):
        """They are counted before there is a token for each of their places."""
        chunk = Chunk(tokens=draw(20, 1), slots=((2, 3, 1049), (5, 5, 1000)))
        with pytest.raises(ConfigError, match="slots of 2049 positions; the context has 2048"):
            engine.generate([Request([chunk, Text(tokens=(5,))], "prompt-cache")])

    @pytest.mark.parametrize(
        ("capacity", "fits", "change", "message"),
        [
            (100, {"slots": 90, "end": 80}, {"slots": 91}, "needs 101 KV slots"),
            # A compile samples a token, which needs a slot.
            (
                100,
                {"slots": 40, "end": 40, "compile_slots": 99, "compile_end": 99},
                {"compile_slots": 100},
                r"need 101 KV slots with pads; .* room for 100",
            ),
            (200, {"slots": 110, "end": 90}, {"end": 91}, "needs 101 positions with pads"),
            (
                200,
                {"slots": 90, "end": 80},
                {"compares": True},
                r"the model has one layer .*select=first",
            ),
        ],
    )
    def test_more_than_a_request_may_have(self, capacity, fits, change, message):
        limits = Limits(capacity, positions=100, blocks=50, block_size=16, layers=1)
        footprint = Footprint(spare=2, **fits)
        assert limits.check(footprint, max_tokens=10) == 2 + -(-(fits["slots"] + 10) // 16)
        with pytest.raises(ConfigError, match=message):
            limits.check(replace(footprint, **change), max_tokens=10)

    def test_room_for_generated_tokens(self):
        limits = Limits(capacity=200, positions=100, blocks=50, block_size=16, layers=2)
        assert limits.room(Footprint(slots=110, spare=2, end=90)) == 10

    def test_a_refused_request_leaves_the_engine_usable(self, engine, inside, draw):
        good = Request([Chunk(tokens=draw(40, 2)), Text(tokens=draw(5, 3))])
        bad = Request([Text(tokens=draw(5, 3))], algorithm="mepik")
        with pytest.raises(ConfigError, match="did you mean"):
            engine.generate([good, bad])
        assert engine.generate([good])[0].tokens

    @pytest.mark.parametrize("count", [0, -1, True, 4.0])
    def test_a_request_has_at_least_one_token_to_make(self, engine, draw, count):
        prompt = [Chunk(tokens=draw(40, 2)), Text(tokens=draw(5, 3))]
        named, plain = Request(prompt, max_tokens=count), Request(prompt)
        match = f"^max_tokens must be at least 1, got {count}"
        with pytest.raises(ConfigError, match=match):
            engine.generate([named], ignore_eos=True)
        with pytest.raises(ConfigError, match=match):
            engine.submit(named)
        with pytest.raises(ConfigError, match=match):
            engine.generate([plain], max_tokens=count)
        with pytest.raises(ConfigError, match=r"^concurrency must be at least 1"):
            engine.generate([plain], concurrency=count)

    def test_an_algorithm_without_a_name_is_not_the_default(self, engine, draw):
        with pytest.raises(ConfigError, match="unknown algorithm ''"):
            engine.generate([Request([Text(tokens=draw(5, 3))], algorithm="")])

    @pytest.mark.parametrize("name", ["context", "batch_tokens", "max_requests"])
    def test_a_limit_of_nothing_is_not_the_default(self, llama, name):
        with pytest.raises(ConfigError, match=f"^{name} must be at least 1, got 0"):
            EngineConfig(model=str(llama), **{name: 0})

    def test_text_without_a_tokenizer(self, engine):
        with pytest.raises(ConfigError, match="has no tokenizer"):
            engine.generate([Request([Text("words")])])


class TestGuard:
    """vLLM ignores arguments that it does not know; the plug-in does not."""

    def test_a_stock_engine_refuses_chunks(self, llama, draw):
        stock = EngineConfig(model=str(llama), stock=True, algorithm="prefix", kv_blocks=64)
        with Engine(stock) as engine:
            prepared = engine._prepare(Request([Text(tokens=draw(20, 1))]), 2, None, True)
            prepared.sampling_params.extra_args = {"pic": {"spans": [[0, 10]]}}
            with pytest.raises(ValueError, match="started without picbench"):
                engine._submit(Submission(prepared, time.time(), 0.0))

    def test_a_pic_engine_refuses_bad_spans(self, engine, draw):
        prepared = engine._prepare(Request([Text(tokens=draw(20, 1))]), 2, None, True)
        prepared.sampling_params.extra_args = {"pic": {"spans": [[4, 2]]}}
        with pytest.raises(ValueError, match=r"spans\[0\]"):
            engine._submit(Submission(prepared, time.time(), 0.0))

    def test_a_request_is_checked_once(self, engine, draw, monkeypatch):
        measured: list[Any] = []
        upstream = limits.measure

        def measure(*arguments: Any) -> Footprint:
            measured.append(arguments)
            return upstream(*arguments)

        monkeypatch.setattr(limits, "measure", measure)
        asked = Request([Chunk(tokens=draw(20, 1)), Text(tokens=draw(4, 2))])
        engine.abort(engine.submit(asked, max_tokens=1))
        assert len(measured) == 1

    def test_extending_twice_guards_once(self):
        patches.extend_frontend()
        guarded = InputProcessor.process_inputs
        patches.extend_frontend()
        assert InputProcessor.process_inputs is guarded

    def test_an_engine_that_was_started_without_the_plug_in_ends(self, monkeypatch):
        with pytest.raises(ConfigError, match="plug-in is not loaded"):
            _checked(config(additional_config={"pic": {}}))
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        with pytest.raises(ConfigError, match="leaves picbench's plug-in out"):
            _checked(config(additional_config={"pic": {}}))


class TestFeatures:
    """What vLLM derives from the order of a prompt's tokens is refused for requests with chunks."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"prompt_logprobs": 1}, "leave prompt_logprobs"),
            ({"skip_reading_prefix_cache": True}, "leave prompt_logprobs"),
        ],
    )
    def test_of_requests(self, engine, draw, change, message):
        prompt, llm = {"prompt_token_ids": list(draw(20, 1))}, engine._running.engine
        change |= {"detokenize": False, "max_tokens": 1}
        chunks = {"pic": {"spans": [[0, 10]]}}
        with pytest.raises(ValueError, match=message):
            llm.add_request("planned", prompt, SamplingParams(extra_args=chunks, **change))
        assert not llm.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"resumable": True}, "streaming input"),
            ({"prompt_token_ids": None}, "embeddings"),
            ({"thinking_token_budget": 4}, "thinking_token_budget"),
            ({"prompt_logprob_token_ids": [[5]] * 19}, "prompt_logprob_token_ids"),
        ],
    )
    def test_of_other_engines(self, engine, draw, change, message):
        """What this engine's vLLM has no use for, or refuses itself."""
        config = engine._running.engine.vllm_config
        for changes in ({}, change):
            asked = SimpleNamespace(
                sampling_params=SamplingParams(extra_args={"pic_spans": [0, 10]}),
                prompt_token_ids=list(draw(20, 1)),
                cache_salt=None,
                resumable=False,
            )
            for name, value in changes.items():
                setattr(asked if hasattr(asked, name) else asked.sampling_params, name, value)
            if not changes:
                check_request(config, asked, Registry())
                continue
            with pytest.raises(ConfigError, match=message):
                check_request(config, asked, Registry())

    def test_more_added_tokens_than_a_request_may_have(self, engine, draw, monkeypatch):
        """They are counted before they are made: so many would fill any memory."""

        def made(*given: Any) -> Any:
            raise AssertionError("link tokens were made")

        monkeypatch.setattr(KVLink, "arrange", made)
        segments = [Chunk(tokens=draw(20, 1)), Chunk(tokens=draw(20, 2)), Text(tokens=(5,))]
        for option in ("", ":first=3"):
            asked = Request(segments, algorithm=f"kvlink:n={1 << 30}{option}")
            with pytest.raises(ConfigError, match=rf"adds {2 << 30} tokens to the prompt"):
                engine.generate([asked])

    def test_a_refusal_is_an_error_of_the_client(self):
        """vLLM's servers answer these with 400; and they cross processes."""
        refused = patches.RequestError("too long", hint="shorten it")
        assert isinstance(refused, VLLMClientError)
        assert str(pickle.loads(pickle.dumps(refused))) == "too long (shorten it)"
