"""Prompt templates: the text before and after a context."""

from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from picbench.errors import ConfigError, closest

_FIELDS = frozenset({"context", "input"})


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with ``{context}`` exactly once and ``{input}`` where the question goes.

    Doubled braces are literal, as in Python's format strings and in LongBench. `where` names the
    template in errors.
    """

    text: str
    where: str = "template"

    def __post_init__(self) -> None:
        found = [name for _, name in self._parse() if name is not None]
        unknown = sorted(set(found) - _FIELDS)
        if unknown:
            raise self._error(f"unknown field {{{unknown[0]}}}")
        if found.count("context") != 1:
            raise self._error("{context} must occur exactly once")

    def render(self, question: str) -> tuple[str, str]:
        """Return the texts before and after the context."""
        sides = [""]
        for literal, name in self._parse():
            sides[-1] += literal
            if name == "context":
                sides.append("")
            elif name == "input":
                sides[-1] += question
        head, tail = sides
        return head, tail

    def _parse(self) -> list[tuple[str, str | None]]:
        try:
            return [(literal, name) for literal, name, _, _ in Formatter().parse(self.text)]
        except ValueError as error:
            raise self._error(str(error)) from error

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {problem}", hint="fields are {context} and {input}; write {{ for {"
        )


def read_prompt(path: Path, dataset: str) -> tuple[Template, int | None]:
    """A data set's template and the length of its replies in tokens, if any, in a file of prompts.

    It is in LongBench's ``dataset2prompt`` format: either one JSON object with `dataset2prompt` and
    optionally `dataset2maxlen`, or the map from data set to template alone, as in LongBench's own
    configuration folder. Raises ConfigError for another file, and for one without the data set.
    """
    from picbench.workloads.sources.row_schema import PromptFileSchema, first_problem

    try:
        found = PromptFileSchema.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="`prompts`") from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: {first_problem(error)}",
            hint='`prompts` takes JSON like {"dataset2prompt": {"musique": "..."}}',
        ) from error
    known = found.dataset2prompt
    if dataset not in known:
        problem = f"{path}: no prompt for data set {dataset!r}"
        raise ConfigError(problem, hint=closest(dataset, known))
    template = Template(known[dataset], where=f"{path}: {dataset}")
    return template, found.dataset2maxlen.get(dataset)
