"""Write a tiny model of random weights, of any architecture that `transformers` knows."""

from pathlib import Path

from picbench.workloads.models.architectures import Architecture
from picbench.workloads.models.extras import engine_packages


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
