"""Commands that tell without a run: explain, and selftest."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Done
from full_disk import largest_file
from harness_fakes import FakeEngine, ForgetfulEngine, Harness, make_sample
from matplotlib.image import imread
from PIL import Image

from picbench.cli import main
from picbench.engines.algorithms import names
from picbench.store.reader import read_run

MEPIC = """\
mepic: MEPIC: shared chunk blocks, first block of each chunk recomputed

segment  positions  compiled  masked pads  text  linked  shared  copied  added
text          0-19         -            -    20       -       -       -      -
chunk 1      20-59        40            8     -      16      24       -      -
chunk 2      60-99        40            8     -      16      24       -      -
text       100-109         -            -    10       -       -       -      -

once: compiles 80 tokens, 6 blocks
each request: computes 62 of 110 tokens, maps 4 shared blocks, copies 0, computes 4
computed blocks that an equal prefix finds again: 3

Blocks in compute order, a letter a slot: t text, l linked, s shared, c copied, + added, . not seen
   0  shared    ssssssssssssssss  chunk 1 36-51
   1  shared    ssssssss........  chunk 1 52-59
   2  shared    ssssssssssssssss  chunk 2 76-91
   3  shared    ssssssss........  chunk 2 92-99
   4  computed  tttttttttttttttt  text 0-15
   5  computed  ttttllllllllllll  text 16-19, chunk 1 20-31
   6  computed  llllllllllllllll  chunk 1 32-35, chunk 2 60-71
   7  computed  lllltttttttttt    chunk 2 72-75, text 100-109

What a row's tokens see of a column's: ■ all, ◣ those up to themselves, · nothing;
□ ◺ the same of KV that only their chunk saw: an anchor, or tokens before linking
                              1 2 3 4 5 6
 1 text          0-19  text   ◣ · · · · ·
 2 chunk 1      20-35  linked ■ ◣ · · · ·
 3 chunk 1      36-59  shared · □ ◣ · · ·
 4 chunk 2      60-75  linked ■ ■ ■ ◣ · ·
 5 chunk 2      76-99  shared · · · □ ◣ ·
 6 text       100-109  text   ■ ■ ■ ■ ■ ◣
"""


def explain(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["explain", *arguments], env={"NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


def test_text() -> None:
    assert explain("mepic", "--chunks", "2") == MEPIC


@pytest.mark.parametrize("algorithm", names())
def test_every_algorithm_can_be_explained(algorithm: str) -> None:
    shown = explain(algorithm, "--chunks", "2", "--tokens", "20")
    assert shown.startswith(algorithm)
    assert "\x1b" not in shown


def test_anchors_are_a_column_of_their_own() -> None:
    lines = explain("epic:k=0", "--chunks", "2").splitlines()
    assert "once: compiles 80 tokens, 6 blocks, each after 4 that are discarded" in lines
    assert lines[-4].split()[-5:] == ["·", "◣", "·", "·", "·"]
    assert lines[-3].split()[-5:] == ["□", "·", "◣", "·", "·"]
    assert lines[-1].split()[-5:] == ["·", "■", "■", "■", "◣"]


def test_nothing_of_full_is_found_again() -> None:
    assert "once: compiles nothing\n" in explain("full")
    assert "an equal prefix finds again: 0\n" in explain("full")
    assert "an equal prefix finds again: 11\n" in explain("prefix")


def test_picture_is_a_column_wide_and_has_all_colours(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mepic.png"
    assert explain("mepic", "--output", str(path)).splitlines()[-1] == str(path)
    pixels = imread(path)[..., :3]
    assert pixels.shape[1] / 220 == pytest.approx(85 / 25.4, abs=0.01)
    for colour in ("56B4E9", "D55E00", "004C80", "333333"):
        wanted = np.array(list(bytes.fromhex(colour))) / 255
        near = np.abs(pixels - wanted).max(axis=2) < 0.04
        assert near.mean() > 0.005, colour
    with Image.open(path) as image:
        assert image.info["Description"].startswith("mepic; ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["mepik"], "unknown algorithm 'mepik' (did you mean 'mepic'?)"),
        (["mepic", "--chunks", "0"], "--chunks 0 is too few (give at least 1)"),
        (["mepic", "--tokens", "-3"], "--tokens -3 is too few (give at least 1)"),
        (
            ["mepic", "--tokens", "501"],
            "a picture of 4 chunks of 501 tokens has no room "
            "(lower --chunks or --tokens to 2000 chunk tokens)",
        ),
        (["mepic", "--output", "a.pdf"], "--output a.pdf is no PNG (let the name end in .png)"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], line: str) -> None:
    done = CliRunner().invoke(main, ["explain", *arguments])
    assert done.exit_code == 2
    assert done.stderr == f"picbench: {line}\n"


def test_a_picture_that_does_not_fit_is_named_and_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with largest_file(500):
        done = CliRunner().invoke(main, ["explain", "mepic", "--output", str(path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"picbench: {path}: File too large (")
    assert list(tmp_path.iterdir()) == []


COUNT = 40


class BrokenReuseEngine(ForgetfulEngine):
    forgotten = COUNT


class LossyEngine(ForgetfulEngine):
    forgotten = COUNT // 2


def selftest(output: Path, *flags: str, wrong: FakeEngine | None = None) -> tuple[Done, Harness]:
    samples = [make_sample(n) for n in range(COUNT)]
    engines = {
        "full#2": FakeEngine("full"),
        "naive": LossyEngine("naive"),
        "shuffled": wrong or BrokenReuseEngine("shuffled"),
    }
    harness = Harness(samples, weights="real", engines=engines)
    arguments = ("selftest", "--output", str(output), *flags)
    return CliRunner().invoke(main, arguments, obj=harness.services()), harness


def test_a_sound_harness_is_exit_0(tmp_path: Path) -> None:
    done, harness = selftest(tmp_path / "run")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 5
    assert lines[-1] == str(tmp_path / "run")
    assert list(harness.servers) == ["full", "full#2", "naive", "shuffled"]


def test_engines_that_answer_well_from_wrong_kv_are_exit_3(tmp_path: Path) -> None:
    done, _ = selftest(tmp_path / "run", "--json", wrong=FakeEngine("shuffled"))
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert document["passed"] is False
    failed = [c["name"] for c in document["controls"] if not c["passed"]]
    assert failed == ["the KV of other chunks"]


def test_its_run_can_be_compared_like_any_other(tmp_path: Path) -> None:
    selftest(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert {row.arm for row in run.rows} == {"full", "full#2", "naive", "shuffled"}
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "run"), "--arms", "full,full#2"])
    assert done.exit_code == 0
    assert "full#2 against full: 40 samples" in done.stdout


@pytest.mark.parametrize("flags", [("--limit", "1"), ("--device", "tpu")])
def test_wrong_usage_is_exit_2(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done, _ = selftest(tmp_path / "run", *flags)
    assert done.exit_code == 2
