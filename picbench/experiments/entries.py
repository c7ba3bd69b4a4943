"""What commands call, where a measurement does not take its settings as they are yet."""

import os

from picbench.run.measurements import DecodeShared, Kernels, Outcome


def kernels(settings: Kernels) -> Outcome:
    """See `Kernels`."""
    from picbench.workloads.models import engine_packages

    with engine_packages():
        from picbench.engines.vllm.device import CUDA, find

        here = find(settings.device)
    if here is CUDA:
        from picbench.experiments.kernels import bench as on_cuda

        return on_cuda(settings)
    import torch

    from picbench.experiments.cpu_kernels import bench as on_cpu

    torch.set_num_threads(settings.threads or torch.get_num_threads())
    return on_cpu(settings)


def shared_decode(settings: DecodeShared) -> Outcome:
    """See `DecodeShared`."""
    if settings.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from picbench.workloads.models import engine_packages

    with engine_packages():
        from picbench.experiments import shared_kernels

    return shared_kernels.measure(settings)
