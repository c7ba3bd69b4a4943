"""The command line: `python -m picbench.agreement replies` and `compare`."""

from pathlib import Path

import click

from picbench.cli.guard import GuardedGroup
from picbench.errors import InvalidRun
from picbench.measure.agreement import TOLERANCE, read_replies, read_run, write
from picbench.workloads.testbed import DATASETS, model_path

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group(cls=GuardedGroup)
def main() -> None:
    """Compare vLLM's replies with those of Hugging Face's own model."""


@main.command()
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), required=True)
@click.option("--model", type=_FOLDER, default=model_path(), help="The model folder.")
@click.option("--rows", type=click.IntRange(1), default=200, help="Rows of every data set.")
@click.option("--dataset", "datasets", type=click.Choice(DATASETS), multiple=True)
@click.option("--output", type=_FILE, required=True, help="The file to write.")
def replies(dtype: str, model: Path, rows: int, datasets: tuple[str, ...], output: Path) -> None:
    """Collect greedy replies of LlamaForCausalLM, on a GPU if there is one."""
    from picbench.measure.replies import collect

    collect(model, dtype, datasets or DATASETS, rows, output)


@main.command()
@click.argument("runs", type=_FOLDER, nargs=-1, required=True)
@click.option("--replies", "files", type=_FILE, multiple=True, required=True)
@click.option("--output", type=_FOLDER, required=True, help="The folder to write to.")
def compare(runs: tuple[Path, ...], files: tuple[Path, ...], output: Path) -> None:
    """Compare run directories of the arm full with files of replies; exit 3 where they differ."""
    references = [side for file in files for side in read_replies(file)]
    found = write([read_run(folder) for folder in runs], references, output)
    apart = [one for one in found if abs(one.difference) > TOLERANCE]
    if apart:
        names = ", ".join(f"{one.dataset} in {one.dtype}" for one in apart)
        raise InvalidRun(f"vLLM and Hugging Face differ by more than {TOLERANCE}: {names}")
    click.echo(f"{len(found)} comparisons, all within {TOLERANCE}: {output / 'agreement.md'}")


if __name__ == "__main__":
    main()
