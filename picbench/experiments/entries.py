"""What commands call, where a measurement does not take its settings as they are yet."""

import os
from typing import Any

from picbench.experiments.measurements import (
    Accuracy,
    AllSteps,
    Architectures,
    BreakEven,
    DecodePlanned,
    DecodeUnderLoad,
    DepthPage,
    EngineComparison,
    HostTier,
    Kernels,
    LoadReport,
    OracleCheck,
    Outcome,
    ProfileCheck,
    RopePadAblation,
    Scaling,
    ScoredPage,
    ServeAlone,
    ServedOnDevice,
    ServeScores,
    SharedDecode,
    SmallSteps,
    Storm,
    Tiers,
    WarmChunks,
)

#: The exit code where something is left to measure.
_LEFT = 4


def _say(line: object) -> None:
    print(line, flush=True)


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


def warm_chunks(settings: WarmChunks) -> Outcome:
    """See `WarmChunks`."""
    from picbench.experiments import warm_chunks as measuring

    given = settings.model_dump(exclude={"output", "commit", "busy_cores"})
    chosen = measuring.WarmSettings(**given, busy=settings.busy_cores)
    measuring.measure(chosen, settings.commit, settings.output)
    return Outcome((settings.output / "warm-chunks.md").read_text(encoding="utf-8"))


def all_steps(settings: AllSteps) -> Outcome:
    """See `AllSteps`."""
    from picbench.experiments import steps
    from picbench.store import provenance

    found = steps.steps(settings.output, settings.runs, settings.commit)
    if settings.list:
        return Outcome("\n".join(f"{step.name:12} {step.summary}" for step in found))
    commit = settings.commit or provenance.checkout()
    return Outcome(
        code=steps.run_steps(found, settings.runs, settings.only, commit, redo=settings.redo)
    )


def architectures(settings: Architectures) -> Outcome:
    """See `Architectures`."""
    from picbench.experiments import oracle

    return Outcome(code=0 if oracle.check_architectures(**dict(settings)) else 1)


def oracle_check(settings: OracleCheck) -> Outcome:
    """See `OracleCheck`."""
    from picbench.experiments import oracle

    return Outcome(code=0 if oracle.measure(**dict(settings)) else 1)


def break_even(settings: BreakEven) -> Outcome:
    """See `BreakEven`."""
    from picbench.experiments import break_even as measuring

    return measuring.measure(settings, _say)


def profile_check(settings: ProfileCheck) -> Outcome:
    """See `ProfileCheck`."""
    from picbench.experiments import profile_check as measuring

    return measuring.measure(settings, _say)


def decode(settings: DecodePlanned) -> Outcome:
    """See `DecodePlanned`."""
    from picbench.experiments import engine_speed

    allowed, page = engine_speed.measure_decode_cost(
        settings.model, settings.rounds, settings.commit, settings.output
    )
    return Outcome(page, 0 if allowed else 1)


def _shown(measured: tuple[str, bool]) -> Outcome:
    page, whole = measured
    return Outcome(page, 0 if whole else _LEFT)


def _served(settings: ServedOnDevice, *others: str) -> dict[str, Any]:
    dtype = "float32" if settings.device == "cpu" else "bfloat16"
    given = settings.model_dump(exclude={"estimate", *others})
    return given | {"model": settings.served, "dtype": dtype}


def decode_load(settings: DecodeUnderLoad) -> Outcome:
    """See `DecodeUnderLoad`."""
    from picbench.experiments import decode_load as measuring

    given = _served(settings, "sharing") | {"reply": settings.reply or 0}
    run = measuring.DecodeRun(**given)
    if settings.estimate:
        return Outcome(measuring.estimated(run, sharing=settings.sharing))
    return _shown(measuring.measure(run, _say, sharing=settings.sharing))


def load_report(settings: LoadReport) -> Outcome:
    """See `LoadReport`."""
    from picbench.experiments import load_report as measuring

    run = measuring.LoadRun(**_served(settings))
    if settings.estimate:
        return Outcome(measuring.estimated(run))
    return _shown(measuring.measure(run, _say))


def scaling(settings: Scaling) -> Outcome:
    """See `Scaling`."""
    from picbench.experiments import scaling as measuring

    run = measuring.ScalingRun(**_served(settings))
    if settings.estimate:
        return Outcome(measuring.estimated(run))
    return _shown(measuring.measure(run, _say))


def engine_comparison(settings: EngineComparison) -> Outcome:
    """See `EngineComparison`."""
    from picbench.experiments import engine_speed

    engine_speed.measure(settings.model, settings.repeats, settings.commit, settings.output)
    return Outcome()


def host_tier(settings: HostTier) -> Outcome:
    """See `HostTier`."""
    from picbench.experiments import host_tier as measuring

    return Outcome(measuring.measure(**dict(settings)))


def small_steps(settings: SmallSteps) -> Outcome:
    """See `SmallSteps`."""
    from picbench.experiments import engine_speed

    return Outcome(engine_speed.measure_small_steps(**dict(settings)))


def rope_pad_ablation(settings: RopePadAblation) -> Outcome:
    """See `RopePadAblation`."""
    from picbench.experiments import rope_pad

    given = settings.model_dump(exclude={"output", "commit"})
    chosen = rope_pad.AblationSettings(**given)
    return Outcome(rope_pad.measure(chosen, settings.commit, settings.output))


def kernels(settings: Kernels) -> Outcome:
    """See `Kernels`."""
    from picbench.workloads.models.extras import engine_packages

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
    from picbench.workloads.models.extras import engine_packages

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
