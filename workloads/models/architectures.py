"""Which architectures picbench was checked with, which it refuses, and a tiny model of each.

Checked means: a model of this architecture with random weights was served by the engine with
`naive`, `epic`, `mepic` and `full`, cold and warm, and each reply was the oracle's. The tests check
every row on a CPU; ``picbench measure architectures`` checks them on a GPU, and its result is kept
in ``results/gpu/architectures.json``, which a row must not contradict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from picbench.workloads.models import engine_packages
from picbench.workloads.yaml_data import read_data

Support = Literal["checked", "refused", "not checked"]

#: Quantised weights, whatever the architecture: FP8, AWQ, GPTQ and all others of vLLM.
QUANTISED = "FP8, AWQ, GPTQ, ..."


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table, and what sets its tiny model apart.

    `name` is what the row is called by, `architecture` the class that ``config.json`` names.
    `fields` are those of its tiny model's configuration that are not common to all, as
    Hugging Face's class for `kind` takes them; `rope` are rotary parameters. `why` says why it is
    refused where it is, in words of the error, or what is slow about it.
    """

    name: str
    models: str
    architecture: str
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    cpu: Support = "checked"
    gpu: Support = "not checked"
    why: str = ""

    @property
    def configuration(self) -> dict[str, Any]:
        """All fields of the tiny model's configuration."""
        common = read_data("models", "architectures")["common"]
        rope = {"rope_type": "default", "rope_theta": 10_000.0} | dict(self.rope)
        return {**common, **self.fields, "rope_parameters": rope}


@cache
def architectures() -> tuple[Architecture, ...]:
    """Every row, in the order in which they are listed."""
    return tuple(Architecture(**row) for row in read_data("models", "architectures")["rows"])


def rows() -> list[tuple[str, str, str]]:
    """(name, models, what is known) of every architecture, to be read; models are padded."""
    found = [
        *((row.name, row.models, _known(row)) for row in architectures()),
        ("others", "whatever vLLM loads", "not checked; refused unless every layer can be served"),
        ("any", QUANTISED, "refused (picbench was not checked with quantised weights)"),
    ]
    width = max(len(models) for _, models, _ in found)
    return [(name, f"{models:<{width}}", known) for name, models, known in found]


def _known(row: Architecture) -> str:
    devices = f"{row.cpu} on CPU, {row.gpu} on GPU"
    if row.cpu == row.gpu:
        devices = f"{row.cpu} on CPU and GPU"
    return f"{devices} ({row.why})" if row.why else devices


def write(row: Architecture, folder: Path) -> Path:
    """Write the tiny model of an architecture to `folder`: the same weights on every call.

    Norms and biases, which are ones and zeros in new models, are drawn, too: an engine that forgot
    them would agree with the oracle otherwise. Nothing is downloaded.
    """
    with engine_packages():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(row.kind, **row.configuration)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, values in model.named_parameters():
                if values.dim() == 1:
                    values.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    return folder
