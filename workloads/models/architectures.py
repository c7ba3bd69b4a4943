"""Which architectures picbench was checked with, which it refuses, and a tiny model of each.

Checked means: a model of this architecture with random weights was served by the engine with
`naive`, `epic`, `mepic` and `full`, cold and warm, and each reply was the oracle's. Of quantised
weights: each way to serve a prompt that must give stock vLLM's answer gave it. The tests check
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


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table, and what sets its tiny model apart.

    `name` is what the row is called by, `architecture` the class that ``config.json`` names.
    `fields` are those of its tiny model's configuration that are not common to all, as
    Hugging Face's class for `kind` takes them; `rope` are rotary parameters. A language model with
    other modalities has its own fields below `wrapper`, which are those beside it. Checkpoints have
    experts `transposed` that Hugging Face's class has as they are computed with. Its `weights` may
    be quantised, in a form of `quantised.py`, and computed with in the type that `dtypes` names by
    device. `why` says why it is refused where it is, in words of the error, or what is slow about
    it.
    """

    name: str
    models: str
    architecture: str
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    wrapper: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False
    weights: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    cpu: Support = "checked"
    gpu: Support = "not checked"
    why: str = ""

    @property
    def configuration(self) -> dict[str, Any]:
        """All fields of the tiny model's configuration."""
        common = read_data("models", "architectures")["common"]
        rope = {"rope_type": "default", "rope_theta": 10_000.0} | dict(self.rope)
        language = {**common, **self.fields, "rope_parameters": rope}
        return {**self.wrapper, "text_config": language} if self.wrapper else language


@cache
def architectures() -> tuple[Architecture, ...]:
    """Every row, in the order in which they are listed."""
    return tuple(Architecture(**row) for row in read_data("models", "architectures")["rows"])


def rows() -> list[tuple[str, str, str]]:
    """(name, models, what is known) of every architecture, to be read; models are padded."""
    found = [
        *((row.name, row.models, _known(row)) for row in architectures()),
        ("others", "whatever vLLM loads", "not checked; refused unless every layer can be served"),
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
        import transformers

        from picbench.workloads.models.quantised import save_quantised
    config = transformers.AutoConfig.for_model(row.kind, **row.configuration)
    kind: Any = getattr(transformers, row.architecture)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        with torch.no_grad():
            for name, values in model.named_parameters():
                if values.dim() == 1:
                    values.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    if row.weights:
        save_quantised(model, folder, row.weights)
    else:
        state = _published(model.state_dict()) if row.transposed else None
        model.save_pretrained(folder, state_dict=state, save_original_format=state is None)
    return folder


def _published(state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights whose experts are transposed."""
    return {
        name: values.transpose(1, 2).contiguous()
        if values.dim() == 3 and ".experts." in name
        else values
        for name, values in state.items()
    }


def coverage() -> list[tuple[str, str]]:
    """(kind of attention, how many of vLLM's recipes for models that have it are served).

    A recipe is served where its architecture was checked, and its form of weights where it has
    none in 16 bits.
    """
    data, known = read_data("models", "recipes"), {row.name: row for row in architectures()}
    found: dict[str, list[tuple[int, bool, bool]]] = {}
    for group in data["groups"]:
        rows = [known[group[name]] for name in ("row", "weights") if name in group]
        cpu, gpu = (
            bool(rows) and all(said == "checked" for said in each)
            for each in ([row.cpu for row in rows], [row.gpu for row in rows])
        )
        found.setdefault(group["kind"], []).append((len(group["recipes"]), cpu, gpu))
    found[f"all recipes of {data['as_of']}"] = [one for each in found.values() for one in each]
    return [
        (
            kind,
            f"{sum(n for n, cpu, _ in each if cpu)} of {sum(n for n, *_ in each)} on CPU, "
            f"{sum(n for n, _, gpu in each if gpu)} on GPU",
        )
        for kind, each in found.items()
    ]
