"""What commands that measure have in common: `picbench measure`, `picbench reproduce`."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import CommandGroup, GuardedCommand
from picbench.cli.options import FILE, FOLDER, RangeOfNumbers
from picbench.engines.config import SHARED_DECODE

if TYPE_CHECKING:
    from picbench.profile.predictor import PredictorErrors


#: The model that is served on a GPU where none is named.
LLAMA = "shape:llama-3.1-8b"

CAVEAT = click.option(
    "--caveat", default="", metavar="TEXT", help="What readers must know of the figures."
)
COMMIT = click.option(
    "--commit", metavar="NAME", show_default="this checkout's", help="Name of the measured code."
)
DEVICE = click.option("--device", default="cuda", show_default=True, help="cuda or cpu.")
EAGER = click.option("--eager", is_flag=True, help="Neither compile nor capture CUDA graphs.")
MODEL = click.option("--model", default=LLAMA, show_default=True)
#: The model and the type that `served_by` chooses by the device.
OWN_MODEL = click.option(
    "--model", show_default=f"{LLAMA}, the testbed on a CPU", help="Who serves it."
)
OWN_DTYPE = click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16")),
    show_default="bfloat16, float32 on a CPU",
    help="Type of weights and KV.",
)
ON_CPU = click.option("--output", type=FOLDER, default=Path("results/cpu"), show_default=True)
ON_GPU = click.option("--output", type=FOLDER, default=Path("results/gpu"), show_default=True)
REPEATS = click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
SECONDS = click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    default=0.0,
    metavar="S",
    show_default="no limit",
    help="Begin nothing that would not end within this time; the same command goes on.",
)
SEED = click.option("--seed", type=int, default=0, show_default=True, help="For inputs and order.")


def _part(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", value)
    part = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise click.BadParameter(f"{value!r}: not like 1/2")
    return part


PART = click.option(
    "--part",
    callback=_part,
    default="1/1",
    show_default="all",
    metavar="K/N",
    help="Measure the K-th of N shares; N processes, each on a GPU of its own, write the same "
    "output.",
)


def served_by(
    device: str, model: str | None, dtype: str | None = None, *, on_cpu: str = "testbed"
) -> dict[str, Any]:
    """A device, and the model and the type that were given or are the device's own."""
    cpu = device == "cpu"
    return {
        "device": device,
        "model": model or (on_cpu if cpu else LLAMA),
        "dtype": dtype or ("float32" if cpu else "bfloat16"),
    }


def exact_float32() -> None:
    """Triton multiplies float32 in TensorFloat-32 unless told otherwise when it is imported."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"


_PARTS = Path("results/testbed/algorithms")

_SERVED = click.option(
    "--parts",
    type=FOLDER,
    default=_PARTS,
    show_default=True,
    help="The output folder of picbench measure algorithms serve.",
)
_PAGES = click.option("--output", type=FOLDER, default=_PARTS.parent, show_default=True)


@click.group(cls=CommandGroup)
def algorithms() -> None:
    """Every algorithm in one engine: scores, linked tokens, and answers in a batch and alone."""


def _serving(output: Path) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of commands that serve data sets by all algorithms, and write to `output`."""
    options = (
        click.option("--output", type=FOLDER, default=output, show_default=True),
        COMMIT,
        click.option("--model", default="testbed", show_default=True, help="Or a tuned variant."),
        click.option(
            "--dataset",
            multiple=True,
            metavar="NAME",
            show_default="all six",
            help="Only this one; repeat the flag for more.",
        ),
        click.option("--algo", multiple=True, metavar="SPEC", help="Only these, and full."),
        DEVICE,
        EAGER,
        click.option(
            "--kv-blocks",
            type=click.IntRange(1024),
            default=16_384,
            show_default=True,
            help="Pool of the engine, in blocks of 16 tokens.",
        ),
        click.option("--max-requests", type=click.IntRange(1), default=64, show_default=True),
        SEED,
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@algorithms.command()
@_serving(_PARTS)
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@click.option(
    "--rows", type=click.IntRange(1), default=200, show_default=True, help="Rows of each data set."
)
@click.option(
    "--first", type=click.IntRange(0), default=0, show_default=True, help="Skip this many rows."
)
@click.option("--drop", is_flag=True, help="Leave out the passages before those that answer.")
@click.option(
    "--seconds",
    type=float,
    default=0.0,
    show_default="no limit",
    help="Begin no rows after this time.",
)
def serve(**options: Any) -> int:
    """Score all algorithms on every row, in batches of all of them; exit 4 if rows are missing.

    Each data set is a file in the output folder, and the same command continues where it was
    stopped. Several may run at once, each with a data set of its own.
    """
    exact_float32()
    from picbench.experiments import serve_arms

    return serve_arms.measure(serve_arms.ServeSettings(**_named(options)), click.echo).code


@algorithms.command()
@_serving(Path("results/gpu"))
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32")
@click.option("--requests", type=click.IntRange(1), default=200, show_default=True)
def alone(**options: Any) -> None:
    """Compare a batch of all algorithms with each request alone; exit 3 if float32 differs."""
    exact_float32()
    from picbench.experiments import serve_arms

    serve_arms.measure_alone(serve_arms.AloneSettings(**_named(options)), click.echo)


@algorithms.command()
@_SERVED
@_PAGES
def page(parts: Path, output: Path) -> None:
    """Make tables and the figure from the scores; needs no engine."""
    from picbench.experiments import algorithms_page

    click.echo(algorithms_page.write(parts, output))


@algorithms.command()
@_SERVED
@_PAGES
def depth(parts: Path, output: Path) -> None:
    """Scores by depth of the needle, hops, and distance between chunks; needs no engine."""
    from picbench.experiments import depth as depth_page

    click.echo(depth_page.write(parts, output))


@algorithms.command(name="warm-chunks")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@click.option("--repeats", type=click.IntRange(2), default=9, show_default=True)
@click.option("--chunks", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--busy-cores",
    "busy",
    type=click.IntRange(0),
    default=max(1, (os.cpu_count() or 2) // 2),
    show_default="half of them",
    help="Measure everything also while this many cores are busy; 0: do not.",
)
def warm_chunks(output: Path, commit: str | None, **options: Any) -> None:
    """TTFT of 32k tokens of warm chunks as served, beside a prefix hit; on an H200 3 minutes."""
    from picbench.experiments import warm_chunks as measuring

    measuring.measure(measuring.WarmSettings(**options), commit, output)
    click.echo((output / "warm-chunks.md").read_text(encoding="utf-8"))


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Without the data sets, if none is named."""
    return {name: value for name, value in options.items() if value or name != "dataset"}


@click.command(name="break-even", cls=GuardedCommand)
@click.option(
    "--output",
    type=FOLDER,
    default=Path("results/break_even"),
    show_default=True,
    help="Folder to write to; a stopped measurement continues there.",
)
@COMMIT
@DEVICE
@OWN_MODEL
@OWN_DTYPE
@SECONDS
@CAVEAT
@PART
@click.option("--dry-run", is_flag=True, help="Say what is left to do and how long it may take.")
@click.option("--page", is_flag=True, help="Only make tables and figures of what is measured.")
def break_even(
    *,
    output: Path,
    device: str,
    model: str | None,
    dtype: str | None,
    dry_run: bool,
    page: bool,
    **options: Any,
) -> int:
    """Serve a grid of traffic under full, prefix, reorder, mepic, and naive: on a GPU small steps.

    Reuse, chunks, their length, the corpus, arrivals, cold and warm caches, three seeds, in stages
    of which each leaves a grid that is of use. Exit 4 if cells are left.
    """
    from picbench.experiments import grid as measuring
    from picbench.experiments.break_even import stage_errors, write_page
    from picbench.profile.grid import read_grid
    from picbench.profile.predictor import GridPredictor

    run = measuring.GridRun(
        **served_by(device, model, dtype),
        output=output,
        **options,
    )
    if dry_run:
        click.echo(measuring.estimate(run))
        return 0
    done = None if page else measuring.measure_grid(run, click.echo)
    grid = read_grid(run.path)
    errors = GridPredictor(grid).errors()
    notes = [*_notes(errors), stage_errors(grid, run.settings)]
    write_page(grid, output, ["## How well it interpolates", *notes])
    if done is None:
        return 0
    click.echo(done)
    return 0 if done.done == done.total else 4


def _notes(errors: "PredictorErrors") -> Iterator[str]:
    yield (
        "Error of what `picbench profile` predicts for each traffic from all others: TTFT of "
        f"requests alone: {errors.ttft or 'too few points'}; requests a second in bursts: "
        f"{errors.requests_s or 'too few points'}."
    )
    yield "The same of grids that end after a stage, and their crossings beside the whole one's:"


@click.command(cls=GuardedCommand)
@ON_CPU
@COMMIT
@click.option("--model", default="testbed", show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=21, show_default=True)
def decode(output: Path, commit: str | None, model: str, rounds: int) -> int:
    """What decoding a planned request costs on a CPU; exit 1 if it costs too much.

    That is beside a plain request in the same engine. Threads are as many as OMP_NUM_THREADS says.
    """
    from picbench.experiments import engine_speed as measuring

    allowed, page = measuring.measure_decode_cost(model, rounds, commit, output)
    click.echo(page)
    return 0 if allowed else 1


@click.command(cls=GuardedCommand)
@DEVICE
@click.option("--model", default="testbed", show_default=True, help="With full attention and RoPE.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32")
@EAGER
@click.option("--synchronous", is_flag=True, help="Schedule no step ahead.")
@click.option("--keys-without-rope", is_flag=True, help="Cache all keys without RoPE.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, help="GPUs of the engine.")
@click.option(
    "--shared-decode",
    type=click.Choice(("off", "auto", "always")),
    default="off",
    show_default=True,
    help="Read chunks once for all requests that decode; always, also where that is slower.",
)
def oracle(**settings: Any) -> int:
    """Compare an engine with the oracle; exit 1 where they differ."""
    exact_float32()
    from picbench.experiments import oracle as checking

    page, code = checking.measure(checking.OracleSettings(**settings), click.echo)
    click.echo(page)
    return code


@click.command(cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32")
@EAGER
@click.option("--only", multiple=True, metavar="NAME", help="Only these; repeat the flag for more.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="At a time.")
def architectures(**settings: Any) -> int:
    """Compare engines with the oracle on a tiny model of each architecture; exit 1 where wrong.

    Needs no network. Architectures that are refused must be refused for the reason that picbench
    list models gives.
    """
    from picbench.experiments import oracle as checking

    made = checking.ArchitectureSettings(**settings)
    page, code = checking.check_architectures(made, click.echo)
    click.echo(page)
    return code


@click.command(cls=GuardedCommand)
@ON_GPU
@COMMIT
@click.option("--model", default="shape:small", show_default=True)
@click.option("--device", default="auto", show_default=True, help="cuda or cpu.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32")
@EAGER
@click.option("--synchronous", is_flag=True, help="Schedule no step ahead.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, help="Workers.")
@click.option("--pool", type=click.IntRange(32), default=5000, show_default=True, help="Blocks.")
@click.option("--tiers", default="", show_default="none", help="As for picbench run.")
@click.option("--requests", type=click.IntRange(1), default=1000, show_default=True)
@click.option(
    "--longest",
    type=click.IntRange(256),
    default=32_000,
    show_default=True,
    help="Prompt tokens. Shapes get as many positions as that needs.",
)
@click.option("--preemptions", type=int, default=0, show_default=True, help="At least this many.")
@SEED
def storm(**options: Any) -> int:
    """Compare a starved pool under mixed requests and aborts with a large one; exit 1 if wrong."""
    exact_float32()
    from picbench.experiments import storm as measuring

    page, code = measuring.measure(measuring.StormSettings(**options), click.echo)
    click.echo(page)
    return code


@click.command(name="engine-comparison", cls=GuardedCommand)
@ON_GPU
@COMMIT
@MODEL
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def engine_comparison(output: Path, commit: str | None, model: str, repeats: int) -> None:
    """Time the engine against stock vLLM on one GPU."""
    from picbench.experiments import engine_speed as comparison

    comparison.measure(model, repeats, commit, output)


@click.command(cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Of each set. The card is about 200: other numbers are shown beside it and not judged.",
)
@EAGER
def accuracy(**options: Any) -> None:
    """Score the testbed model in the engine; exit 3 where its card has another score."""
    exact_float32()
    from picbench.experiments import serve_arms

    serve_arms.measure_accuracy(serve_arms.AccuracySettings(**options), click.echo)


@click.command(name="rope-pad-ablation", cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="bfloat16")
@EAGER
@click.option("--chunks", type=click.IntRange(4), default=64, show_default=True, help="Timed.")
@click.option("--repeats", type=click.IntRange(2), default=9, show_default=True)
@click.option(
    "--rows", type=click.IntRange(2), default=50, show_default=True, help="Of each data set."
)
def rope_pad_ablation(output: Path, commit: str | None, **settings: Any) -> None:
    """Keys rotated in attention or before it, pads masked or counted: times, blocks, scores."""
    from picbench.experiments import rope_pad as measuring

    click.echo(measuring.measure(measuring.AblationSettings(**settings), commit, output))


_CHUNKS = click.option(
    "--chunks", type=click.IntRange(2), default=64, show_default=True, help="A prompt."
)


@click.command(cls=GuardedCommand, name="host-tier")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@REPEATS
@_CHUNKS
def host_tier(**settings: Any) -> None:
    """Check chunks from the host's memory, then time stores and loads, and requests meanwhile."""
    exact_float32()
    from picbench.experiments import host_tier as measuring

    click.echo(measuring.measure(**settings))


@click.command(cls=GuardedCommand, name="small-steps")
@ON_GPU
@COMMIT
@DEVICE
@MODEL
@REPEATS
@click.option(
    "--graph-tokens",
    type=click.IntRange(1),
    multiple=True,
    default=(512, 1024),
    show_default=True,
    help="The largest step, in tokens, that CUDA graphs serve; two engines for each value.",
)
def small_steps(output: Path, commit: str | None, **settings: Any) -> None:
    """TTFT of prompts that compute few tokens, by the size of graphs, and the GPU's part of it."""
    from picbench.experiments import engine_speed as measuring

    click.echo(measuring.measure_small_steps(**settings, commit=commit, output=output))


@click.command(cls=GuardedCommand)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What to measure on; auto is what the installed vLLM serves here.",
)
@click.option(
    "--output",
    type=FOLDER,
    default=Path("runs/kernels"),
    show_default=True,
    help="Where tables go. Cases that are in them, from the same commit, are not timed again on a "
    "GPU.",
)
@click.option("--rounds", type=click.IntRange(5), default=21, show_default=True, help="Of a case.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Of a case on a CPU.")
@click.option("--threads", type=click.IntRange(1), show_default="all cores", help="Of a CPU.")
@click.option(
    "--work",
    multiple=True,
    type=click.Choice(("decode", "link", "prefill", "chunked")),
    help="Only cases of these kinds; a GPU has decode and link, a CPU all but link.",
)
@SEED
@COMMIT
def kernels(device: str, output: Path, threads: int | None, seconds: float, **options: Any) -> None:
    """Check the kernels, then time them against those that vLLM itself uses.

    On a GPU that is FlashAttention-3, on a CPU vLLM's own attention. A kernel whose output is wrong
    is not timed: the command ends with exit code 3. Prints a table.
    """
    from picbench.workloads.models.extras import engine_packages

    with engine_packages():
        from picbench.engines.vllm.device import CUDA, find

        here = find(device)
    if here is CUDA:
        from picbench.experiments.kernels import bench as on_cuda

        click.echo(on_cuda(output, **options))
        return
    import torch

    from picbench.experiments.cpu_kernels import bench as on_cpu

    torch.set_num_threads(threads or torch.get_num_threads())
    click.echo(on_cpu(output, seconds=seconds, **options))


@click.command(name="shared-decode", cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True, help="Of a case.")
@click.option("--case", "only", type=int, multiple=True, help="Only these, by number from 0.")
@SEED
def shared_decode(output: Path, **options: Any) -> None:
    """Check decode that reads shared chunks once, then time it against FlashAttention-3.

    A kernel whose output is wrong is not timed: the command ends with exit code 3. On a CPU kernels
    are interpreted, and tiny scenes are checked.
    """
    if options["device"] == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from picbench.workloads.models.extras import engine_packages

    with engine_packages():
        from picbench.experiments import shared_kernels as measuring

    click.echo(measuring.measure(output, **options))


@click.command(name="profile", cls=GuardedCommand)
@click.option("--grid", required=True, metavar="NAME|FILE", help="See picbench profile.")
@click.option("--calibration", metavar="FILE", help="See picbench profile.")
@click.option("--output", type=FOLDER, default=Path("runs/profile"), show_default=True)
@COMMIT
@DEVICE
@OWN_MODEL
@OWN_DTYPE
@click.option(
    "--seed", type=int, show_default="that of the results", help="What the traces are drawn with."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    default=0.0,
    metavar="S",
    show_default="no limit",
    help="Begin no repeat after the first that would not end within this time; the same command "
    "goes on.",
)
@PART
@CAVEAT
def profile_check(
    *,
    grid: str,
    calibration: str | None,
    output: Path,
    commit: str | None,
    device: str,
    model: str | None,
    dtype: str | None,
    seed: int | None,
    repeats: int,
    seconds: float,
    part: tuple[int, int],
    caveat: str,
) -> int:
    """Serve three traces that no grid has, and compare with what picbench profile predicts.

    Repeats that are done are kept. Exit 4 if repeats are left.
    """
    from picbench.errors import ConfigError
    from picbench.experiments.grid import GridRun
    from picbench.experiments.profile_check import SEED, check_profile
    from picbench.profile.grid import choose_calibration, choose_grid
    from picbench.profile.predictor import GridPredictor

    measured = choose_grid(grid)
    if measured is None:
        raise ConfigError(f"`grid` {grid}: nothing to check", hint="name a grid.json")
    run = GridRun(
        **served_by(device, model, dtype),
        seconds=seconds,
        output=output,
        commit=commit,
        caveat=caveat,
        part=part,
    )
    predictor = GridPredictor(measured, calibration=choose_calibration(calibration, measured))
    drawn = SEED if seed is None else seed
    _, done = check_profile(run, predictor, repeats, click.echo, drawn)
    click.echo(output / "profile.md")
    return 0 if done else 4


_MODEL = click.option(
    "--model", show_default=f"{LLAMA}, shape:tiny on a CPU", help="Who serves it."
)
_SHARED_DECODE = click.option(
    "--shared-decode",
    type=click.Choice(SHARED_DECODE),
    default="auto",
    show_default=True,
    help="For mepic's engine, as for picbench run.",
)
_ESTIMATE = click.option(
    "--estimate", is_flag=True, help="Say how long the rest takes; measure nothing."
)


@click.command(name="decode-load", cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option(
    "--sharing", is_flag=True, help="Measure over degrees of sharing instead, with a figure."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--reply",
    type=click.IntRange(8),
    metavar="N",
    show_default="512, 32 for --sharing",
    help="Tokens in a reply.",
)
@SECONDS
@_ESTIMATE
def decode_load(
    *,
    device: str,
    model: str | None,
    reply: int | None,
    sharing: bool,
    estimate: bool,
    **options: Any,
) -> int:
    """Decoding of 64 requests of 32k tokens that share chunks, against stock vLLM.

    Rounds that are done are kept; other settings or another commit start over. Exit 4 if rounds
    are left.
    """
    from picbench.experiments import decode_load as measuring

    run = measuring.DecodeRun(
        reply=reply or 0, **served_by(device, model, on_cpu="shape:tiny"), **options
    )
    if estimate:
        click.echo(measuring.estimated(run, sharing=sharing))
        return 0
    return _shown(measuring.measure(run, click.echo, sharing=sharing))


@click.command(name="load-report", cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option(
    "--only",
    multiple=True,
    metavar="GROUP",
    show_default="all",
    help="share-nothing, 2wiki, mixed, cold, closed or rate; repeat the flag for more.",
)
@_SHARED_DECODE
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@SECONDS
@_ESTIMATE
def load_report(*, device: str, model: str | None, estimate: bool, **options: Any) -> int:
    """Loads of mepic and of stock vLLM, each with a server of its own, several times.

    Nothing shared, more requests than can be served, plain requests beside long prompts, cold
    prompts, a closed loop over corpora, rates. Cells that are done are kept; another commit starts
    over. Exit 4 if cells are left.
    """
    from picbench.experiments import load_report as measuring

    run = measuring.LoadRun(**served_by(device, model, on_cpu="shape:tiny"), **options)
    if estimate:
        click.echo(measuring.estimated(run))
        return 0
    return _shown(measuring.measure(run, click.echo))


@click.command(cls=GuardedCommand)
@ON_GPU
@COMMIT
@DEVICE
@_MODEL
@click.option(
    "--workers",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    help="GPUs of the larger engine.",
)
@_SHARED_DECODE
@click.option(
    "--graph-tokens",
    type=click.IntRange(1),
    default=None,
    show_default="the engine's own",
    help="Largest step of mepic's engines with a CUDA graph.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@SECONDS
@_ESTIMATE
def scaling(*, device: str, model: str | None, estimate: bool, **options: Any) -> int:
    """Throughput of an engine on several GPUs against one, and of stock vLLM.

    Rounds that are done are kept; another commit starts over. Exit 4 if rounds are left.
    """
    from picbench.experiments import scaling as measuring

    run = measuring.ScalingRun(**served_by(device, model, on_cpu="shape:tiny"), **options)
    if estimate:
        click.echo(measuring.estimated(run))
        return 0
    return _shown(measuring.measure(run, click.echo))


def _shown(measured: tuple[str, bool]) -> int:
    """Print the page of what is measured; the exit code by whether that is all."""
    page, whole = measured
    click.echo(page)
    return 0 if whole else 4


@click.group(cls=CommandGroup)
def measure() -> None:
    """Measure and check parts of picbench by themselves."""


@measure.command(name="all")
@ON_GPU
@COMMIT
@click.option("--only", multiple=True, metavar="STEP", help="Run these steps and no others.")
@click.option("--redo", is_flag=True, help="Repeat steps that are done.")
@click.option("--list", "listing", is_flag=True, help="Show the steps; run none.")
@click.option(
    "--runs",
    type=FOLDER,
    default=Path("runs/gpu"),
    show_default=True,
    help="Folder for scratch files.",
)
def every(
    output: Path, commit: str | None, only: Sequence[str], redo: bool, listing: bool, runs: Path
) -> int:
    """Run every check on a GPU, then every measurement; continue where an earlier call stopped."""
    from picbench.experiments.steps import run_steps, steps
    from picbench.store import provenance

    found = steps(output, runs, commit)
    if listing:
        for step in found:
            click.echo(f"{step.name:12} {step.summary}")
        return 0
    return run_steps(found, runs, only, commit or provenance.checkout(), redo=redo)


@measure.command()
@click.option("--tiers", required=True, help="Tiers to measure, each alone, as for picbench run.")
@click.option("--sizes", default="1MiB,4MiB,16MiB,32MiB", show_default=True, help="Value sizes.")
@click.option("--batch", default="64MiB", show_default=True, help="Bytes in flight at a time.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
@SEED
@click.option("--output", type=FILE, help="JSON file to write.")
def tiers(**options: Any) -> None:
    """How fast tiers store and fetch chunks."""
    from picbench.experiments import tiers as measuring

    click.echo(measuring.measure(measuring.TierSettings(**options)).page)


for command in (
    *(
        accuracy,
        architectures,
        decode,
        engine_comparison,
        oracle,
        rope_pad_ablation,
        storm,
    ),
    *(kernels, shared_decode),
    *(decode_load, load_report, scaling, storm),
    *(host_tier, small_steps),
    *(algorithms, break_even, profile_check),
):
    measure.add_command(command)
