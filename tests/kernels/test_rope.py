"""Rotation with the parameters of real rotary modules."""

import pytest
import torch
from paged_cases import BACKENDS, Layout, make_case, relative_error, rope_table

from picbench.errors import EngineError
from picbench.kernels.rope import RopeTable, rotate
from picbench.kernels.shape import HeadShape

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama3_table(head_size: int, length: int = 256) -> tuple[RopeTable, object, object]:
    """The table, and the cosines and sines that Hugging Face's module gives for each position."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=length,
        rope_parameters=LLAMA3,
    )
    module = LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1, 1, 1), torch.arange(length)[None])
    half = head_size // 2
    table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    return RopeTable(table, head_size), cos[0], sin[0]


@pytest.mark.parametrize("head_size", [64, 128])
def test_rotation_equals_hugging_face_with_llama3_scaling(head_size: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    table, cos, sin = llama3_table(head_size)
    keys = torch.randn(256, 2, head_size)
    heads_first = keys.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    found = rotate(keys, table.rows(torch.arange(256)))
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("head_size", [64, 128])
def test_attention_with_llama3_scaling(use_vllm: bool, head_size: int) -> None:
    pytest.importorskip("transformers")
    table, *_ = llama3_table(head_size)
    layouts = [
        Layout(list(range(150)), 20, list(range(10)), affine=True),
        Layout([*range(200, 232), *range(100, 120)], 1, [11, 12, 13, 14]),
    ]
    case = make_case(layouts, HeadShape(8, 2, head_size, torch.float32), rope=table)
    assert relative_error(case.run(use_vllm), case.expected()) <= 1e-5


def test_minus_one_rotates_nothing_even_where_the_model_scales_its_table() -> None:
    scaled = RopeTable(1.5 * rope_table(64).cos_sin_cache, 64)
    keys = torch.randn(3, 2, 64)
    rotated = rotate(keys, scaled.rows(torch.tensor([-1, 0, -1])))
    assert torch.equal(rotated[[0, 2]], keys[[0, 2]])
    torch.testing.assert_close(rotated[1], 1.5 * keys[1])


def test_pages_hold_the_rows_of_sixteen_slots() -> None:
    table, positions = rope_table(64), torch.arange(5, 37)
    pages = table.pages(positions).view(2, 64, 16)
    assert torch.equal(pages.transpose(1, 2).reshape(32, 64), table.rows(positions))


def test_interleaved_pairing_is_refused() -> None:
    with pytest.raises(EngineError, match="interleaved"):
        RopeTable(torch.zeros(4, 64), 64, is_neox=False)


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(EngineError, match="does not fit"):
        RopeTable(torch.zeros(4, 64), 128)
