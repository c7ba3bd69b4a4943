"""Rows of pools in the layouts that vLLM has: one storage for all layers, or one a layer."""

import pytest
import torch
from torch import Tensor

from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.errors import EngineError

LAYERS, BLOCKS, HEADS, SLOTS, WIDTH = 3, 7, 2, 16, 4
PAGE = (HEADS, SLOTS, WIDTH)


def apart(dtype: torch.dtype) -> list[Tensor]:
    return [torch.rand(BLOCKS, *PAGE).to(dtype) for _ in range(LAYERS)]


def layer_by_layer(dtype: torch.dtype) -> list[Tensor]:
    return list(torch.rand(LAYERS, BLOCKS, *PAGE).to(dtype))


def block_by_block(dtype: torch.dtype) -> list[Tensor]:
    return list(torch.rand(BLOCKS, LAYERS, *PAGE).to(dtype).unbind(1))


def slots_first(dtype: torch.dtype) -> list[Tensor]:
    """In memory a page is [slots, heads, width]."""
    return [x.transpose(1, 2) for x in torch.rand(LAYERS, BLOCKS, SLOTS, HEADS, WIDTH).to(dtype)]


LAYOUTS = {"apart": apart, "layers": layer_by_layer, "blocks": block_by_block, "slots": slots_first}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_blocks_of_all_layers(layout: str, dtype: torch.dtype) -> None:
    pool = LAYOUTS[layout](dtype)
    before = [layer.clone() for layer in pool]
    rows = PoolRows(pool)
    assert rows.one_kernel == (layout != "apart")
    assert rows.row_bytes == sum(layer[0].numel() * layer.element_size() for layer in pool)
    assert rows.blocks == BLOCKS
    memory = rows.empty(3)
    rows.gather(rows.ids([5, 0, 3]), memory)
    rows.scatter(rows.ids([1, 2, 6]), memory)
    rows.copy([(4, 5)])
    moved = {5: 4, 1: 5, 2: 0, 6: 3}
    for layer, was in zip(pool, before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(layer[block], was[moved.get(block, block)])


def test_copies_within_the_pool_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = layer_by_layer(torch.float32)
    before = [layer.clone() for layer in pool]
    rows = PoolRows(pool)
    monkeypatch.setattr("picbench.engines.vllm.transfer.pool_rows._COPIED", 2 * rows.row_bytes)
    rows.copy([(0, 4), (1, 5), (2, 6)])
    for layer, was in zip(pool, before, strict=True):
        assert torch.equal(layer[4:], was[:3])


def test_layouts_of_pages_are_told_apart() -> None:
    found = {PoolRows(LAYOUTS[name](torch.float32)).layout for name in LAYOUTS}
    assert len(found) == 2
    half = PoolRows(apart(torch.float16)).layout
    assert half != PoolRows(apart(torch.bfloat16)).layout


def test_blocks_with_holes_are_refused() -> None:
    with pytest.raises(EngineError, match="not dense"):
        PoolRows([torch.zeros(BLOCKS, HEADS, SLOTS, 2 * WIDTH)[..., :WIDTH]])
