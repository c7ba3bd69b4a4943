"""What a model runner needs to run planned requests: their table, and a planner for their steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.footprint import LINK_WORKSPACE, SHARED_PARTS
from picbench.engines.vllm.settings import PicSettings
from picbench.engines.vllm.worker.attention_layers import head_shape
from picbench.engines.vllm.worker.cuda.dense import DensePlanner
from picbench.engines.vllm.worker.cuda.kernel_planner import KernelPlanner
from picbench.engines.vllm.worker.cuda.metadata import Planner
from picbench.engines.vllm.worker.cuda.planned_requests import PlainPrefixes, PlannedRequests
from picbench.engines.vllm.worker.key_check import check_keys
from picbench.engines.vllm.worker.model_pass import ModelPass
from picbench.engines.vllm.worker.rotary import QueryRotary, replace_rotary, rope_table
from picbench.engines.vllm.worker.slot_map import SlotMap
from picbench.engines.vllm.worker.token_picker import FindPrompt, TokenPicker
from picbench.errors import ConfigError
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.key_cells import CELL_BLOCKS
from picbench.kernels.cuda.decode.shared.shared_decode import serves_groups
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.decode.shared.sharing_costs import SharingCosts
from picbench.kernels.cuda.support import describe, require
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerAttention:
    """A runner's planned requests, planner of their steps, RoPE, and picker of linked tokens."""

    requests: PlannedRequests
    planner: Planner
    rope: RopeTable
    picker: TokenPicker

    @classmethod
    def of(cls, vllm_config: Any, model: nn.Module, device: torch.device) -> "RunnerAttention":
        """The attention of an engine whose model is loaded; bare keys replace its rotary modules.

        Raises ConfigError if keys cannot be re-rotated.
        """
        settings = PicSettings.read(vllm_config.additional_config) or PicSettings()
        bare = settings.keys_without_rope
        rope, config = rope_table(model, exact=True), vllm_config.model_config
        check_keys(model, rope, config.get_hidden_size(), config.dtype)
        if bare:
            replace_rotary(model, QueryRotary, exact=True)
        shape = head_shape(vllm_config)
        rope = rope.tempered(settings.temperatures_served, shape.head_size)
        picker = TokenPicker.of(ModelPass(model, vllm_config, rope, bare=bare), _read)
        most = vllm_config.scheduler_config.max_num_seqs
        try:
            require(shape)
        except ConfigError as error:
            logger.warning_once("picbench: %s; PyTorch attends, which is slow", error.message)
            requests = PlannedRequests(most, None, keys_without_rope=bare, rope=rope)
            return cls(requests, DensePlanner(rope), rope, picker)
        blocks = -(-config.max_model_len // BLOCK_SIZE) + 1
        table = _table(settings, most + 1, blocks, device, shape)
        planner = KernelPlanner(table, most, rope, shape, CudaWorkspace(LINK_WORKSPACE, device))
        kernels = describe(shape, rope, planner.table)
        logger.info_once("picbench: %s (%d MiB)", kernels, planner.nbytes >> 20)
        shared = isinstance(planner.table, SharedRequestTable)
        prefixes = PlainPrefixes(CELL_BLOCKS) if shared else None
        requests = PlannedRequests(
            most, planner.table, keys_without_rope=bare, prefixes=prefixes, rope=rope
        )
        return cls(requests, planner, rope, picker)

    def pick(self, slot_maps: Mapping[str, SlotMap], find: FindPrompt) -> None:
        """Pick the linked tokens of requests that compute their first tokens in the next step."""
        for request_id, arrangement in self.picker.pick(slot_maps, find):
            self.requests.arrange(request_id, arrangement)

    def warm_up(self, model: nn.Module) -> None:
        """Compile what steps can need, once the layers of the `model` have their KV caches."""
        caches = (layer.kv_cache for layer in model.modules() if isinstance(layer, Attention))
        self.planner.warm_up(next(caches))


def _read(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = kv_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE].chunk(2, dim=-1)
    return keys, values


def _table(
    settings: PicSettings, rows: int, blocks: int, device: torch.device, shape: HeadShape
) -> RequestTable:
    bare = settings.keys_without_rope
    if settings.shared_decode != "off":
        if serves_groups(shape):
            costs = SharingCosts.always() if settings.shared_decode == "always" else SharingCosts()
            return SharedRequestTable(
                *(rows, blocks, device, shape),
                unrotated=bare,
                costs=costs,
                parts_bytes=SHARED_PARTS,
            )
        logger.warning_once("picbench: no kernel reads chunks once for heads like these")
    return RequestTable(rows, blocks, device, unrotated=bare)
