"""Rotation with the parameters of real rotary modules."""

from typing import Any

import pytest
import torch
from paged_cases import BACKENDS, TOLERANCE, Layout, make_case, relative_error, rope_table

from picbench.errors import ConfigError, EngineError
from picbench.kernels.rope import RopeTable, rotate, unit_length
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
    found = rotate(keys, table.rows(torch.arange(256)), is_neox=True)
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
    rotated = rotate(keys, scaled.rows(torch.tensor([-1, 0, -1])), is_neox=True)
    assert torch.equal(rotated[[0, 2]], keys[[0, 2]])
    torch.testing.assert_close(rotated[1], 1.5 * keys[1])


def test_pages_hold_the_rows_of_sixteen_slots() -> None:
    table, positions = rope_table(64), torch.arange(5, 37)
    pages = table.pages(positions).view(2, 64, 16)
    assert torch.equal(pages.transpose(1, 2).reshape(32, 64), table.rows(positions))


@pytest.mark.parametrize("rotary_dim", [64, 32], ids=["GPT-J", "GLM"])
def test_interleaved_rotation_equals_hugging_face(rotary_dim: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb

    table = rope_table(rotary_dim, is_neox=False)
    rows = table.rows(torch.arange(100))
    cos, sin = (half.repeat(1, 2)[None] for half in rows.chunk(2, dim=-1))
    keys = torch.randn(100, 2, 64)
    heads_first = keys.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    found = rotate(keys, rows, is_neox=False)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rotary_dim", "is_neox"), [(32, True), (64, False), (24, False)], ids=["half", "GPT-J", "GLM"]
)
def test_attention_with_partial_and_interleaved_rotary(
    use_vllm: bool, dtype: torch.dtype, rotary_dim: int, is_neox: bool
) -> None:
    layouts = [
        Layout(list(range(150)), 20, list(range(10)), affine=True),
        Layout([*range(200, 232), *range(100, 120)], 1, [11, 12, 13, 14]),
        Layout([*range(64, 80), *range(60)], 30, [15, 16, 17, 18, 19]),
    ]
    rope = rope_table(rotary_dim, dtype, is_neox=is_neox)
    case = make_case(layouts, HeadShape(8, 2, 64, dtype), rope=rope)
    assert relative_error(case.run(use_vllm), case.expected()) <= TOLERANCE[dtype]


class TestUnitLength:
    """What a model's table must be, for keys to be shifted by it."""

    def test_a_factor_is_taken_out(self) -> None:
        plain = rope_table(64).cos_sin_cache
        table, factor = unit_length(1.25 * plain)
        assert factor == 1.25
        torch.testing.assert_close(table, plain)

    def test_a_plain_table_stays_as_it_is(self) -> None:
        plain = rope_table(64).cos_sin_cache
        assert unit_length(plain) == (plain, 1.0)

    @pytest.mark.parametrize("is_neox", [True, False])
    def test_a_shifted_key_is_the_key_at_the_other_position(self, is_neox: bool) -> None:
        """Cached at p0 with the factor and then shifted, or rotated at p1 directly."""
        model = RopeTable(1.25 * rope_table(48).cos_sin_cache, 48, is_neox)
        shifts = RopeTable(unit_length(model.cos_sin_cache)[0], 48, is_neox)
        key, before, after = torch.randn(90, 2, 64), torch.arange(90), torch.arange(90).flip(0) + 60
        cached = rotate(key, model.rows(before), is_neox=is_neox)
        shifted = rotate(cached, shifts.shift_rows(after - before), is_neox=is_neox)
        expected = rotate(key, model.rows(after), is_neox=is_neox)
        torch.testing.assert_close(shifted, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda table: torch.cat([table[:40], table[:40]]), "positions times frequencies"),
            (lambda table: table[1:] / table[1, 0], "not of one length"),
            (lambda table: table.roll(3, 0), "positions times frequencies|not of one length"),
            (lambda table: table * torch.linspace(1, 2, 64), "not of one length"),
            (lambda table: table * torch.linspace(1, 2, 512)[:, None], "not of one length"),
            (lambda table: torch.zeros_like(table), "not of one length"),
            (lambda table: table * float("nan"), "not of one length"),
        ],
    )
    def test_other_tables_are_refused(self, change: Any, message: str) -> None:
        with pytest.raises(EngineError, match=message):
            unit_length(change(rope_table(64).cos_sin_cache))


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(EngineError, match="does not fit"):
        RopeTable(torch.zeros(4, 64), 128)


def test_heads_that_are_rotated_in_part_have_no_temperatures() -> None:
    table = RopeTable(torch.ones(4, 32), 32)
    assert table.tempered((), 64).row_of(1.0) == 0
    with pytest.raises(ConfigError, match="not 32 of 64 dimensions"):
        table.tempered((0.5,), 64)
