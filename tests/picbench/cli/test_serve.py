"""`picbench serve` before it becomes vLLM's server."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from picbench.cli import main
from picbench.cli.serve import _check_spelling


def test_show_command_prints_a_command_and_nothing_else() -> None:
    words = ("serve", "testbed", "--show-command", "--dtype", "float32", "--port", "8001")
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0
    assert "-m vllm.entrypoints" in found.stdout
    assert found.stdout.endswith("    --dtype float32 --port 8001\n")
    [line] = found.stderr.splitlines()
    assert line == ("picbench: the model has no chat template: messages are put one after another")


@pytest.mark.parametrize(
    "flags",
    [["--help"], ["--show-command", "--device", "cuda"], ["--show-command", "--dtype=half"]],
)
def test_neither_torch_nor_vllm_is_imported(flags: list[str]) -> None:
    code = (
        "import sys; from picbench.cli import main\n"
        f"try: main(['serve', 'testbed', *{flags!r}])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nosuch", "model nosuch: no such model"),
        ("shape:nosuch", "model shape:nosuch: no such shape"),
        ("owner/nosuch", "model owner/nosuch: cannot load its tokenizer"),
        ("testbed --algo mepik", "--algo: unknown algorithm 'mepik' (did you mean 'mepic'?)"),
        ("testbed --algo epic:k=x", "--algo: "),
        ("testbed --algo reorder", "picbench run does that"),
        ("testbed --tiers hst:1GiB", "--tiers hst:1GiB: unknown kind 'hst'"),
        ("testbed --tiers disk:/proc/x:1GiB", "--tiers disk:/proc/x:1GiB: cannot use the folder"),
        ("testbed --device cuda", "vLLM runs on cpu here, not on cuda"),
        ("testbed --device tpu", "--device"),
        ("testbed --marks x,x", "--marks 'x,x' has a mark that is or contains the other"),
        (
            "testbed --marks x",
            "--marks 'x' is no pair of texts (use on, or a pair of your own, such",
        ),
        ("testbed --algoritm mepic", "no such option: --algoritm (did you mean '--algo'?)"),
        ("testbed --port 1 --algos=mepic", "no such option: --algos (did you mean '--algo'?)"),
        ("testbed --on_pressure reject", "--on_pressure (did you mean '--on-pressure'?)"),
        ("testbed --tier x", "no such option: --tier (did you mean '--tiers'?)"),
        ("testbed --mark on", "no such option: --mark (did you mean '--marks'?)"),
        ("testbed --show-comand", "(did you mean '--show-command'?)"),
        ("testbed --block-size 32", "--block-size 32: picbench sets --block-size 16 itself"),
        ("--port 8001 testbed", "--port: give MODEL first"),
        ("testbed llama", "llama: give MODEL first"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(words: str, said: str) -> None:
    found = CliRunner().invoke(main, ("serve", *words.split()))
    assert found.exit_code == 2
    [line] = found.stderr.splitlines()
    assert said in line
    assert found.stdout == ""


@pytest.mark.engine
def test_flags_of_vllm_are_not_taken_for_misspelt_ones() -> None:
    from server_arguments import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    _check_spelling([flag for action in actions for flag in action.option_strings])


@pytest.mark.parametrize(
    ("given", "field"), [("on", '"marks": true'), ("[[x]],[[/x]]", '"marks": ["[[x]]", "[[/x]]"]')]
)
def test_marks_are_settings_of_the_engine(given: str, field: str) -> None:
    words = ("serve", "testbed", "--marks", given, "--show-command", "--dtype", "float32")
    assert field in CliRunner().invoke(main, words).stdout


def test_every_answer_may_tell_its_usage() -> None:
    words = ("serve", "testbed", "--usage", "--show-command", "--dtype", "float32")
    found = CliRunner().invoke(main, words).stdout
    assert '"usage": true' in found
    assert "--middleware picbench.engines.vllm.frontend.usage.UsageMiddleware" in found


def test_a_folder_is_served_by_its_path(llama: Path) -> None:
    found = CliRunner().invoke(main, ("serve", str(llama), "--show-command"))
    assert found.exit_code == 0, found.stderr
    assert f"--served-model-name {llama}" in found.stdout
