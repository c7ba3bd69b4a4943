"""What decode and link must compute of one request, in float64."""

from torch import Tensor

from picbench.kernels.cuda.layout import key_value
from picbench.kernels.float64_attention import attention_reference
from picbench.kernels.paging import BLOCK_SIZE
from picbench.kernels.rope import RopeTable


def attend_reference(
    query: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    kpos: Tensor,
    rope_shift: Tensor,
    qpos: Tensor,
    rope: RopeTable,
    scale: float,
) -> Tensor:
    """Attention of one request's queries [n, num_heads, head_size], as float64.

    `table` [blocks] names its blocks; `kpos` and `rope_shift` [slots] describe its slots, `qpos`
    [n] its queries, as in `attention_reference`. All tensors are on one device.
    """
    blocks = table[: -(-len(kpos) // BLOCK_SIZE)].long()
    key, value = (half[blocks].flatten(0, 1)[: len(kpos)] for half in key_value(kv_cache))
    return attention_reference(query, key, value, kpos, rope_shift, qpos, rope, scale)
