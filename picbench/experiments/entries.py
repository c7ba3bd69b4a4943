"""What commands call, where a measurement does not take its settings as they are yet."""

import os
from typing import Any

from picbench.experiments.measurements import (
    Accuracy,
    Architectures,
    DepthPage,
    Kernels,
    OracleCheck,
    Outcome,
    ScoredPage,
    ServeAlone,
    ServeScores,
    SharedDecode,
    Storm,
    Tiers,
)

#: The exit code where something is left to measure.
_LEFT = 4


def accuracy(settings: Accuracy) -> Outcome:
    """See `Accuracy`."""
    from picbench.experiments import serve_arms

    found = settings
    serve_arms.measure_accuracy(
        found.device, found.dtype, found.rows, found.eager, found.commit, found.output
    )
    return Outcome()


def _serve_settings(settings: ServeScores | ServeAlone, *others: str) -> Any:
    from picbench.experiments import serve_arms
    from picbench.workloads.testbed import DATASETS

    given = settings.model_dump(exclude={"output", "commit", "dataset", *others})
    return serve_arms.ServeSettings(**given, datasets=settings.dataset or DATASETS)


def serve(settings: ServeScores) -> Outcome:
    """See `ServeScores`."""
    from picbench.experiments import serve_arms

    done = serve_arms.measure(_serve_settings(settings), settings.commit, settings.output)
    return Outcome(code=0 if done else _LEFT)


def alone(settings: ServeAlone) -> Outcome:
    """See `ServeAlone`."""
    from picbench.experiments import serve_arms

    given = _serve_settings(settings, "requests")
    serve_arms.measure_alone(given, settings.requests, settings.commit, settings.output)
    return Outcome()


def scored_page(settings: ScoredPage) -> Outcome:
    """See `ScoredPage`."""
    from picbench.experiments import algorithms_page

    return Outcome(algorithms_page.write(settings.parts, settings.output))


def depth_page(settings: DepthPage) -> Outcome:
    """See `DepthPage`."""
    from picbench.experiments import depth

    return Outcome(depth.write(settings.parts, settings.output))


def architectures(settings: Architectures) -> Outcome:
    """See `Architectures`."""
    from picbench.experiments import oracle

    return Outcome(code=0 if oracle.check_architectures(**dict(settings)) else 1)


def oracle_check(settings: OracleCheck) -> Outcome:
    """See `OracleCheck`."""
    from picbench.experiments import oracle

    return Outcome(code=0 if oracle.measure(**dict(settings)) else 1)


def kernels(settings: Kernels) -> Outcome:
    """See `Kernels`."""
    from picbench.workloads.models import engine_packages

    with engine_packages():
        from picbench.engines.vllm.device import CUDA, find

        here = find(settings.device)
    given = settings.model_dump(include={"output", "rounds", "seed", "work", "commit"})
    if here is CUDA:
        from picbench.experiments.gpu_kernels import bench as on_cuda

        on_cuda(**given)
        return Outcome((settings.output / "kernels.md").read_text(encoding="utf-8"))
    import torch

    from picbench.experiments.cpu_kernels import bench as on_cpu

    torch.set_num_threads(settings.threads or torch.get_num_threads())
    return Outcome(on_cpu(**given, seconds=settings.seconds))


def shared_decode(settings: SharedDecode) -> Outcome:
    """See `SharedDecode`."""
    if settings.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from picbench.workloads.models import engine_packages

    with engine_packages():
        from picbench.experiments import shared_kernels

    given = settings.model_dump(exclude={"case"})
    return Outcome(shared_kernels.measure(**given, only=settings.case))


def storm(settings: Storm) -> Outcome:
    """See `Storm`."""
    from picbench.experiments import storm as measuring

    chosen = measuring.StormSettings(**settings.model_dump(exclude={"output", "commit"}))
    wrong, page = measuring.measure(chosen, settings.commit, settings.output)
    return Outcome(page, 1 if wrong else 0)


def tiers(settings: Tiers) -> Outcome:
    """See `Tiers`."""
    from picbench.experiments import tiers as measuring

    return Outcome(measuring.measure_all(**dict(settings)))
