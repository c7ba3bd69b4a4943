"""The sizes of all requests of a trace, as an arm computes them."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def _numbers() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Tokens of each prompt, those computed, chunks, tokens of the reply; a column each."""

    prompt: "array[float]" = field(default_factory=_numbers)
    computed: "array[float]" = field(default_factory=_numbers)
    chunks: "array[float]" = field(default_factory=_numbers)
    output: "array[float]" = field(default_factory=_numbers)

    def add(self, prompt: int, computed: int, chunks: int, output: int) -> None:
        """A request."""
        self.prompt.append(prompt)
        self.computed.append(computed)
        self.chunks.append(chunks)
        self.output.append(output)

    def costs(self, *, reply: bool) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """What each cost of each request is multiplied by: see `RequestShape.costs`."""
        computed, prompt = np.asarray(self.computed) / 1e3, np.asarray(self.prompt) / 1e3
        output = np.asarray(self.output) * reply
        ones = np.ones(len(self.prompt))
        columns = (ones, computed, computed * prompt, prompt, np.asarray(self.chunks), output)
        return np.stack(columns, axis=1)
