"""Trained models under all arms: prompts of real architectures, estimates, one run, pages."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from harness_fakes import GPU_FACTS
from huggingface_hub import constants
from tiny_llama import write_model

from picbench.cli import main
from picbench.errors import ConfigError
from picbench.papers import serve_arms
from picbench.papers.accuracy import (
    AccuracyRun,
    name_of,
    positions_of,
    read_accuracy,
    read_models,
    write_accuracy,
)
from picbench.papers.arm_scores import ArmRows, Case, ScoredPart
from picbench.papers.settings import FILES
from picbench.workloads.models.shapes import VOCABULARY, write_tokenizer

MODEL, QWEN = "mistralai/Mistral-7B-Instruct-v0.2", "Qwen/Qwen2.5-7B-Instruct"

#: Architecture and configuration of models by their names on the hub.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    MODEL: ("mistral", {"sliding_window": None}),
    QWEN: ("qwen2", {}),
    "01-ai/Yi-Coder-9B-Chat": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
    ),
}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has none of the models yet, and a hub that may not be asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def put(name: str) -> Path:
    """Write a tiny model of random weights under a model's real name."""
    kind, fields = MODELS[name]
    folder = Path(name)
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    return write_model(kind, folder, max_position_embeddings=8192, **(sizes | heads | fields))


def settings(**changes: Any) -> Path:
    content = yaml.safe_load((FILES / "accuracy.yaml").read_text())
    Path("settings.yaml").write_text(yaml.safe_dump(content | changes))
    return Path("settings.yaml")


def reproduce(*flags: str) -> Result:
    return CliRunner().invoke(main, ("reproduce", "accuracy", *flags))


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_every_architecture_fit_its_engine(name: str) -> None:
    put(name)
    found = read_accuracy(settings(longest=1024, rows=2))
    run = AccuracyRun(found, [name], "cpu", Path("out"), "bundled")
    serving = run.serving(name, positions_of(name))
    [case] = [case for case in serving.cases if case.dataset == "needle"]
    load = serve_arms.load_case(
        case, serving.algo, 2, model=name, context=serving.longest, data=serving.data["needle"]
    )
    assert [s.truncated for s in load.samples] == [True, True]
    assert {s.prompt_tokens + s.max_tokens for s in load.samples} <= {1023, 1024}
    assert all(chunk.before for chunk in load.samples[0].chunks[1:])
    config = serve_arms.engine_config(serving, load, serving.longest)
    assert (config.context, config.dtype, config.device) == (2048, "float32", "cpu")
    assert Path(config.model) == Path(name).resolve()
    assert case.name == f"{name.replace('/', '--')}-needle"


@pytest.mark.engine
def test_a_tiny_model_runs_from_its_name_to_its_page() -> None:
    put(MODEL)
    arms = {"arms": ["full", "naive", "mepic:pad=paper"], "drawn": []}
    engines = {"cpu": {"kv_blocks": 1024, "max_requests": 8, "dtype": "float32"}}
    file = settings(datasets=["samsum"], longest=1024, engines=engines, **arms)
    flags = ("--models", MODEL, "--data", "bundled", "--settings", str(file), "--output", "out")
    result = reproduce(*flags, "--rows", "2")
    assert result.exit_code == 0, result.stderr
    [path] = Path("out/scores").glob("*.json")
    assert path.name == "mistralai--Mistral-7B-Instruct-v0.2-samsum.json"
    scores = json.loads(path.read_text())["arms"]
    assert {len(scores[arm]["score"]) for arm in arms["arms"]} == {2}
    page = Path("out/README.md").read_text()
    assert f"Measured: {MODEL}." in page
    assert f"{MODEL}: LegoLink-2 loses at most 7 %" in page
    dry = reproduce(*flags, "--rows", "2", "--dry-run")
    assert "0 of 2 rows" in dry.stdout
    again = reproduce(*flags, "--rows", "2", "--commit", "another")
    assert again.exit_code == 2
    assert "was measured with other settings" in again.stderr


@pytest.mark.engine
def test_how_likely_right_answers_are_has_a_page_of_its_own() -> None:
    put(MODEL)
    arms = ["full", "nocontext", "mepic:anchor=passage"]
    engines = {"cpu": {"kv_blocks": 1024, "max_requests": 8, "dtype": "float32"}}
    content = yaml.safe_load((FILES / "likelihood.yaml").read_text())
    content |= {"arms": arms, "drawn": [], "datasets": ["samsum"], "longest": 1024}
    Path("small.yaml").write_text(yaml.safe_dump(content | {"engines": engines}))
    flags = ("--models", MODEL, "--data", "bundled", "--settings", "small.yaml", "--rows", "4")
    found = CliRunner().invoke(main, ("reproduce", "likelihood", "--output", "out", *flags))
    assert found.exit_code == 0, found.stderr
    [path] = Path("out/scores").glob("*.json")
    part = ScoredPart.read(path)
    assert part.likelihood
    assert part.arms["nocontext"].score == [0.0] * 4
    page = Path("out/README.md").read_text()
    assert page.startswith("# How likely trained models find right answers")
    assert "Published gaps" not in page
    assert "| `nocontext` |" in page


def test_without_the_chunks_and_right_answers_go_together() -> None:
    for name, arms in (("accuracy", ["full", "nocontext"]), ("likelihood", ["full", "naive"])):
        content = yaml.safe_load((FILES / f"{name}.yaml").read_text())
        Path("wrong.yaml").write_text(yaml.safe_dump(content | {"arms": arms, "drawn": []}))
        with pytest.raises(ConfigError, match="the arm nocontext goes with `likelihood`"):
            read_accuracy(Path("wrong.yaml"))


def test_a_model_that_is_not_there_is_one_line_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_arms, "measure", lambda *given: pytest.fail("was measured"))
    result = reproduce("--models", f"testbed,{MODEL}")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert f"--models {MODEL}: HF_HUB_OFFLINE forbids to fetch it" in line
    assert "HF_TOKEN" in line and "a folder with its files" in line


def test_folders_have_their_own_names() -> None:
    folder = put(QWEN).resolve()
    assert positions_of(QWEN) == 8192
    assert [name_of(QWEN), name_of(str(folder))] == [QWEN, "Qwen2.5-7B-Instruct"]
    result = reproduce("--models", f"{folder},{folder}")
    assert "two are called Qwen2.5-7B-Instruct" in result.stderr


def test_longbench_is_from_the_hub_and_needles_are_hidden_in_texts() -> None:
    found = AccuracyRun(read_accuracy(), ["a/b"], "cuda", Path("out"), texts="essays")
    hub = dict.fromkeys(found.settings.datasets, "hub")
    assert found.serving("a/b").data == hub | {"needle": "essays"}
    bundled = AccuracyRun(found.settings, ["a/b"], "cuda", Path("out"))
    assert bundled.serving("a/b").data == hub | {"needle": "bundled"}
    assert set(bundled.serving("testbed").data.values()) == {"bundled"}
    longest = [found.serving(*model).longest for model in (["testbed"], ["a/b"], ["a/b", 8192])]
    assert longest == [None, 15872, 7168]


def test_generated_rows_are_made_in_texts_and_not_read_from_data() -> None:
    settings = read_accuracy().model_copy(update={"datasets": ["musique", "needle", "ruler:vt"]})
    for texts, made in (("essays", "essays"), (None, "bundled")):
        found = AccuracyRun(settings, ["a/b"], "cuda", Path("out"), data="rows", texts=texts)
        data = found.serving("a/b").data
        assert data == {"musique": "rows", "needle": texts or "rows", "ruler:vt": made}


def test_estimates_need_no_model() -> None:
    result = reproduce("--models", "a/b,testbed", "--device", "cuda", "--rows", "10", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("60 of 60 rows") == 2
    real, testbed = AccuracyRun(read_accuracy(), ["a/b", "testbed"], "cuda", Path()).estimates()
    assert real.tokens > 5 * testbed.tokens
    assert real.seconds > 600


def test_options_of_papers_and_of_accuracy_are_told_apart() -> None:
    assert "--seeds 3: not an option here" in reproduce("--seeds", "3").stderr
    assert "--figure fig8: not an option here" in reproduce("--figure", "fig8").stderr
    result = CliRunner().invoke(main, ("reproduce", "epic", "--rows", "3"))
    assert "--rows 3: not an option here" in result.stderr


def put_scores(folder: Path, model: str, **arms: list[float]) -> None:
    rows = len(next(iter(arms.values())))
    facts = GPU_FACTS | {"dtype": "bfloat16", "eager": False}
    found = {arm: ArmRows(scores, [8] * rows, [20] * rows) for arm, scores in arms.items()}
    case = Case(model, "2wikimqa")
    ScoredPart(case, rows, facts, found, [100] * rows, [80] * rows).write(folder)


def test_gaps_are_paired_by_row_and_stand_beside_published_ones(tmp_path: Path) -> None:
    full = [1.0, 0.5] * 40
    put_scores(tmp_path / "scores", MODEL, full=full, naive=[score - 0.25 for score in full])
    verdicts = write_accuracy(read_accuracy(), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert f"Measured: {MODEL}." in page
    # No row differs from the others, and 2.5 % of such samples miss what one row in 22 has.
    assert "| `naive` | 0.500; -0.250 [-0.284, -0.194] |" in page
    assert f"naive | -37.5 | {MODEL} | -25.0 | -28.4 to -19.4 |" in page
    assert "| cacheblend:r=0.15 | -2.3 to +0.6 |" in page
    # Arms that others tuned a model for are not set beside ours.
    assert "block-attention | -10.7 | - | - | - |" in page
    assert (tmp_path / "kept-mistralai--Mistral-7B-Instruct-v0.2.png").exists()
    [naive] = [one for one in verdicts if "Naive reuse loses" in one.claim]
    assert (naive.verdict, naive.ours) == ("holds", "-0.25 (2wikimqa: naive less full)")
    assert f"{MODEL}, 80 rows a set" in str(naive.run)


def test_the_testbed_is_beside_other_models(tmp_path: Path) -> None:
    put_scores(tmp_path / "scores", MODEL, full=[1.0, 0.5], naive=[0.0, 0.0])
    put_scores(tmp_path / "testbed", "testbed", full=[1.0, 0.5])
    put_scores(tmp_path / "testbed", "testbed:block", full=[1.0, 0.5])
    found = read_models(read_accuracy(), tmp_path, tmp_path / "testbed")
    assert [one.model for one in found] == [MODEL, "testbed"]
    alone = write_accuracy(read_accuracy(), tmp_path / "other", tmp_path / "testbed")
    assert "No trained model" in (tmp_path / "other" / "README.md").read_text()
    assert {one.verdict for one in alone} == {"undecided"}


def test_where_full_recompute_scores_nothing_no_ratio_is_taken(tmp_path: Path) -> None:
    put_scores(tmp_path / "scores", MODEL, **{"full": [0.0] * 8, "epic:k=2": [0.0] * 8})
    verdicts = write_accuracy(read_accuracy(), tmp_path)
    [lego] = [one for one in verdicts if "LegoLink-2" in one.claim]
    assert lego.verdict == "undecided"
    assert "no score is known to be above zero" in lego.why
    assert not list(tmp_path.glob("kept-*"))
