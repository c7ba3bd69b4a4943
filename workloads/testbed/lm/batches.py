"""The batch of every training step, for torch's loader."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from picbench.workloads.testbed.lm.packing import Packer
from picbench.workloads.testbed.lm.schedule import Schedule


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The columns of a `PackedBatch` for every step from `first` on, made on demand.

    A worker process opens the tokenizer when it makes its first batch.
    """

    def __init__(self, tokenizer: Path, schedule: Schedule, first: int, seed: int) -> None:
        self._path = str(tokenizer)
        self._schedule = schedule
        self._first = first
        self._seed = seed
        self._packer: Packer | None = None

    def __len__(self) -> int:
        return self._schedule.steps - self._first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._packer is None:
            self._packer = Packer(Tokenizer.from_file(self._path), self._seed)
        step = self._first + index
        batch = self._packer.batch(step, self._schedule.stage(step))
        ids, asked, chunk = map(torch.from_numpy, (batch.ids, batch.asked, batch.chunk))
        return ids, asked, chunk
