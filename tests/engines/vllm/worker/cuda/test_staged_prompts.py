"""Prompts that are staged for vLLM's runner V2 in an array instead of a list."""

from typing import Any

import numpy as np
import pytest

from picbench.engines.planning.pages import TokenIds


@pytest.fixture
def staged() -> Any:
    """vLLM's writer without its buffers, which need a GPU."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    writer: Any = StagedWriteTensor.__new__(StagedWriteTensor)
    writer._staged_write_indices = []
    writer._staged_write_starts = []
    writer._staged_write_cu_lens = []
    writer._staged_write_contents = TokenIds()
    return writer


def test_prompts_with_and_without_a_plan_are_staged_one_after_the_other(staged: Any) -> None:
    staged.stage_write(0, 0, TokenIds([1, 2, 3]))
    staged.stage_write(1, 0, [4, 5])
    staged.stage_write(2, 0, TokenIds())
    staged.stage_write_elem(1, 6)
    assert staged._staged_write_cu_lens == [3, 5, 6]
    buffer = np.zeros(8, np.int32)  # as UvaBufferPool.copy_to_uva writes it
    buffer[:6] = staged._staged_write_contents
    assert buffer.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    staged.clear_staged_writes()
    assert len(staged._staged_write_contents) == 0
