"""What commands call, where a measurement does not take its settings as they are yet."""

import os
from typing import Any

from picbench.experiments.measurements import (
    AllSteps,
    BreakEven,
    DecodePlanned,
    DecodeUnderLoad,
    DepthPage,
    EngineComparison,
    HostTier,
    Kernels,
    LoadReport,
    Outcome,
    ProfileCheck,
    RopePadAblation,
    Scaling,
    ScoredPage,
    ServedOnDevice,
    SharedDecode,
    SmallSteps,
    WarmChunks,
)

#: The exit code where something is left to measure.
_LEFT = 4


def _say(line: object) -> None:
    print(line, flush=True)


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


def _grid_run(settings: BreakEven | ProfileCheck) -> Any:
    from picbench.experiments.grid import GridRun

    return GridRun(
        device=settings.device,
        model=settings.served,
        dtype=settings.served_dtype,
        seconds=settings.seconds,
        output=settings.output,
        commit=settings.commit,
        caveat=settings.caveat,
        part=settings.part,
    )


def break_even(settings: BreakEven) -> Outcome:
    """See `BreakEven`."""
    from picbench.experiments import grid as measuring
    from picbench.experiments.break_even import stage_errors, write_page
    from picbench.profile.grid import read_grid
    from picbench.profile.predictor import GridPredictor

    run = _grid_run(settings)
    if settings.dry_run:
        return Outcome(str(measuring.estimate(run)))
    done = None if settings.page else measuring.measure_grid(run, _say)
    grid = read_grid(run.path)
    errors = GridPredictor(grid).errors()
    notes = (
        "Error of what `picbench profile` predicts for each traffic from all others: TTFT of "
        f"requests alone: {errors.ttft or 'too few points'}; requests a second in bursts: "
        f"{errors.requests_s or 'too few points'}.",
        "The same of grids that end after a stage, and their crossings beside the whole one's:",
    )
    sections = ["## How well it interpolates", *notes, stage_errors(grid, run.settings)]
    write_page(grid, settings.output, sections)
    if done is None:
        return Outcome()
    return Outcome(str(done), 0 if done.done == done.total else _LEFT)


def profile_check(settings: ProfileCheck) -> Outcome:
    """See `ProfileCheck`."""
    from picbench.errors import ConfigError
    from picbench.experiments.profile_check import SEED, check_profile
    from picbench.profile.grid import choose_calibration, choose_grid
    from picbench.profile.predictor import GridPredictor

    measured = choose_grid(settings.grid)
    if measured is None:
        raise ConfigError(f"`grid` {settings.grid}: nothing to check", hint="name a grid.json")
    calibration = choose_calibration(settings.calibration, measured)
    predictor = GridPredictor(measured, calibration=calibration)
    drawn = SEED if settings.seed is None else settings.seed
    _, done = check_profile(_grid_run(settings), predictor, settings.repeats, _say, drawn)
    return Outcome(str(settings.output / "profile.md"), 0 if done else _LEFT)


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


def shared_decode(settings: SharedDecode) -> Outcome:
    """See `SharedDecode`."""
    if settings.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from picbench.workloads.models import engine_packages

    with engine_packages():
        from picbench.experiments import shared_kernels

    return shared_kernels.measure(settings)
