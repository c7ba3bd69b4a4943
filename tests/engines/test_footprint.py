"""What an engine takes of a GPU."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.config import BLOCK_SIZE, EngineConfig, planned_capacity
from picbench.engines.engine import warm_up_requests
from picbench.engines.footprint import LINK_WORKSPACE, SHARED_PARTS, GpuFootprint, parameters
from picbench.engines.model_config import check_ranks, head_size, read_model_config
from picbench.engines.request import Chunk, Request
from picbench.engines.vllm.launch import _context
from picbench.errors import ConfigError
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape
from picbench.workloads.models.architectures import Architecture, architectures
from picbench.workloads.models.shapes import _config, all_shapes

LLAMA = _config(all_shapes()["llama-3.1-8b"])
CONFIG = EngineConfig("llama", context=9789)


def footprint(config: EngineConfig, model: dict[str, Any] = LLAMA) -> GpuFootprint:
    found = GpuFootprint.of(config, model)
    assert found is not None
    return found


def test_llama_has_as_many_parameters_as_its_card_says() -> None:
    assert parameters(LLAMA) == 8_030_261_248


@pytest.mark.parametrize(
    "row",
    [row for row in architectures() if row.cpu == "checked" and not row.weights],
    ids=lambda row: row.name,
)
def test_parameters_of_all_architectures(row: Architecture) -> None:
    """Of the language model where there are others: only that is loaded."""
    import transformers

    config = transformers.AutoConfig.for_model(row.kind, **row.configuration)
    with torch.device("meta"):
        model = getattr(transformers, row.architecture)(config)
    counted = sum(
        values.numel()
        for name, values in model.named_parameters()
        if not re.search("visual|vision|projector", name)
    )
    assert parameters(config.get_text_config().to_dict()) == pytest.approx(counted, rel=0.02)


def test_a_llama_engine_by_hand() -> None:
    found = footprint(CONFIG)
    assert found.weights == 2 * 8_030_261_248
    assert found.block == 32 * 8 * 128 * 2 * 16 * 2
    assert found.activations == 8192 * (2 * 4096 + 3 * 14_336 + 4096) * 2 + 6 * 4 * 64 * 128_256
    assert found.fixed == sum(asdict(found).values()) - found.block


def test_stock_engines_have_no_workspace_and_one_set_of_graphs() -> None:
    pic, stock = footprint(CONFIG), footprint(replace(CONFIG, stock=True))
    assert stock.workspace == 0
    assert pic.graphs == 2 * stock.graphs > 0
    assert footprint(replace(CONFIG, eager=True)).graphs == 0
    for name in ("weights", "activations", "runtime", "block"):
        assert getattr(pic, name) == getattr(stock, name)


def test_two_gpus_halve_what_is_divided() -> None:
    one, two = footprint(CONFIG), footprint(replace(CONFIG, tensor_parallel=2))
    assert (two.weights, two.block) == (one.weights // 2, one.block // 2)
    assert two.runtime > one.runtime


def test_float32_doubles_weights_and_blocks() -> None:
    auto, wide = footprint(CONFIG), footprint(replace(CONFIG, dtype="float32"))
    assert (wide.weights, wide.block) == (2 * auto.weights, 2 * auto.block)


@pytest.mark.parametrize(
    "change", [{"quantization_config": {"bits": 4}}, {"intermediate_size": None}]
)
def test_a_model_that_does_not_tell_its_size(change: dict[str, Any]) -> None:
    model = {name: value for name, value in (LLAMA | change).items() if value is not None}
    assert GpuFootprint.of(CONFIG, model) is None


@pytest.mark.parametrize("name", all_shapes())
def test_every_shape_tells_its_size(name: str) -> None:
    assert GpuFootprint.of(replace(CONFIG, context=512), _config(all_shapes()[name])) is not None


def test_the_workspace_is_that_of_the_kernels() -> None:
    """What `RunnerAttention` allocates, here on a CPU and without the buffer for linking."""
    decode = pytest.importorskip("picbench.kernels.cuda.decode.attention")
    shape = HeadShape(32, 8, 128, torch.bfloat16)
    for unrotated in (False, True):
        config = replace(CONFIG, keys_without_rope=unrotated, shared_decode="off")
        most, slots = config.max_requests, planned_capacity(9789)
        blocks = -(-slots // BLOCK_SIZE) + 1
        table = decode.RequestTable(most + 1, blocks, "cpu", unrotated=unrotated)
        cache = RopeTable(torch.zeros(64, 128), 128)
        batch = decode.DecodeBatch(table, most, shape, cache)
        held = table.nbytes + batch.nbytes
        told = footprint(config).workspace - LINK_WORKSPACE
        assert held <= told
        # The splits of the largest batch depend on the GPU; all else is exact.
        assert told - held <= 4 * most * 64 * 32 * 129


def test_shared_decode_is_counted() -> None:
    pytest.importorskip("picbench.kernels.cuda.decode.attention")
    from picbench.kernels.cuda.decode.attention import DecodeBatch
    from picbench.kernels.cuda.decode.shared.shared_decode import SharedDecodeBatch
    from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable

    shape = HeadShape(32, 8, 128, torch.bfloat16)
    for unrotated in (False, True):
        config = replace(CONFIG, keys_without_rope=unrotated, shared_decode="auto")
        most, slots = config.max_requests, planned_capacity(9789)
        blocks = -(-slots // BLOCK_SIZE) + 1
        table = SharedRequestTable(
            most + 1, blocks, "cpu", shape, unrotated=unrotated, parts_bytes=SHARED_PARTS
        )
        rope = RopeTable(torch.zeros(64, 128), 128)
        # For steps that share what they read, and for others.
        batches = [kind(table, most, shape, rope) for kind in (SharedDecodeBatch, DecodeBatch)]
        held = table.nbytes + sum(batch.nbytes for batch in batches)
        told = footprint(config).workspace - LINK_WORKSPACE
        assert held <= told
        assert told - held <= 2 * 4 * most * 64 * 32 * 129 + (16 << 20)


@given(
    st.integers(16, 100_000),
    st.integers(1, 256),
    st.booleans(),
    st.sampled_from(["auto", "float32"]),
)
def test_more_never_takes_less(context: int, requests: int, stock: bool, dtype: str) -> None:
    config = EngineConfig("m", context=context, max_requests=requests, stock=stock, dtype=dtype)
    larger = replace(config, context=context + 999, max_requests=requests + 1)
    small, large = asdict(footprint(config)), asdict(footprint(larger))
    assert all(large[name] >= value > 0 or value == 0 for name, value in small.items())


def written(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_other_names_are_translated(tmp_path: Path) -> None:
    model = read_model_config(written(tmp_path, model_type="bloom", n_head=4, n_layer=3))
    assert (model["num_attention_heads"], model["num_hidden_layers"]) == (4, 3)
    assert head_size(model) == model["hidden_size"] // 4


def test_a_model_with_other_modalities_is_its_language_model(tmp_path: Path) -> None:
    text = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 77}
    model = read_model_config(written(tmp_path, model_type="llava", text_config=text))
    assert (model["hidden_size"], head_size(model)) == (96, 32)
    assert model["max_position_embeddings"] == 77


def test_an_unknown_kind_is_left_to_the_engine(tmp_path: Path) -> None:
    assert read_model_config(written(tmp_path, model_type="ours", n_head=4)) == {
        "model_type": "ours",
        "n_head": 4,
    }


def test_a_model_of_any_length_needs_a_context(tmp_path: Path) -> None:
    model = read_model_config(written(tmp_path, model_type="bloom", n_head=4))
    assert _context(EngineConfig("bloom", context=300), model) == 300
    with pytest.raises(ConfigError, match=r"no length \(give `context`\)"):
        _context(EngineConfig("bloom"), model)


def test_gpus_have_as_many_heads_each() -> None:
    check_ranks({"num_attention_heads": 8}, 4)
    check_ranks({}, 3)  # A model that does not say is left to vLLM.
    with pytest.raises(ConfigError, match=r"`tensor_parallel` 16: .* 8 .*possible are 1, 2, 4, 8"):
        check_ranks({"num_attention_heads": 8}, 16)


def tokens(request: Request) -> int:
    return sum(len(segment.tokens or ()) for segment in request.segments)


def chunks(request: Request) -> int:
    return sum(isinstance(segment, Chunk) for segment in request.segments)


@given(st.integers(1, 100_000), st.sampled_from(["cpu", "cuda"]), st.booleans())
def test_no_prompt_is_longer_than_the_engine_serves(longest: int, device: str, pic: bool) -> None:
    found = list(warm_up_requests(longest, device, chunks=pic))
    assert all(0 < tokens(request) <= longest for request in found)
    assert chunks(found[0]) == 0


def test_engines_with_chunks_link_few_and_many_tokens() -> None:
    assert [chunks(r) for r in warm_up_requests(9000, "cpu", chunks=True)] == [0, 1, 12]
    assert [chunks(r) for r in warm_up_requests(700, "cpu", chunks=True)] == [0, 12]


def test_prompts_on_gpus_fill_steps() -> None:
    assert [chunks(r) for r in warm_up_requests(9787, "cuda", chunks=True)] == [0, 1, 12, 19]
    assert tokens(list(warm_up_requests(131_072, "cuda", chunks=False))[-1]) == 32_040
