"""Which columns of a row its fields are in: rows of other schemas than LongBench's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picbench.errors import ConfigError, DataError, closest
from picbench.workloads.sources.nested import (
    MISSING,
    ContextPassage,
    find,
    passages,
    strings,
    unpacked,
)

#: What a row can have, and what each field is.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "input": "the question, or what is to be summarised; empty: none",
        "context": "the text that is cut into chunks",
        "passages": "a list of passages, instead of a context",
        "title": "in a passage: its title",
        "body": "in a passage: its text or its sentences",
        "supports": "in a passage: whether the answer needs it",
        "answers": "the replies that count as right: a text or a list",
        "id": "the row's name",
        "gold_passages": "numbers, from 0, of the passages that the answer needs",
        "gold_titles": "titles of the passages that the answer needs",
        "documents": "for each passage the number of its document",
        "each": "a list in the row; each of its elements is a row that sees the columns around it",
    }
)

#: Mappings by name. Those of HotpotQA and 2WikiMultihopQA hold for their own files and for the
#: copies on the hub, whose passages are columns of titles and of sentences.
NAMED: Mapping[str, str] = MappingProxyType(
    {
        "squad": "input=question,context=context,answers=answers.text|answers,id=id|key|",
        "squad-file": "each=paragraphs.qas,input=question,context=context,answers=answers.text,"
        "id=id",
        "mrqa": "each=qas,input=question,context=context,answers=answers,id=qid",
        "narrativeqa": "input=question.text,context=document.summary.text,answers=answers.text",
        "hotpotqa": "input=question,passages=context,title=title,body=sentences|content,"
        "answers=answer,id=_id|id,gold_titles=supporting_facts",
        "musique": "input=question,passages=paragraphs,title=title,body=paragraph_text,"
        "supports=is_supporting,answers=answer+answer_aliases,id=id",
    }
)

#: Where a row's columns are looked up: in its own object, then in those around it.
Scope = Sequence[Mapping[str, Any]]

#: The fields without which there is no row.
_NEEDED = ("input", "context", "answers")

_FORM = "FIELD=COLUMN[,FIELD=COLUMN...], a name such as squad, or a YAML file"


@dataclass(frozen=True, slots=True)
class Columns:
    """The column of each field, by name of the field.

    A column is a name, or names joined by dots for what lies deeper, where lists are passed
    through and a number picks one element; ``a+b`` are both one after the other, ``a|b`` is the
    first of them that a row has, and ``a|`` may be absent. Without any the row has LongBench's
    columns.
    """

    of: Mapping[str, str]

    def scopes(self, values: Mapping[str, Any]) -> Iterator[Scope]:
        """What the columns of each row of a record are looked up in; DataError without `each`."""
        return _scopes([values], self.of.get("each", ""))

    def row(self, scope: Scope) -> dict[str, Any]:
        """A row in LongBench's schema; DataError for a column that `scope` lacks."""
        if not self.of:
            return dict(scope[0])
        row: dict[str, Any] = {
            "input": self._get(scope, "input") if self.of["input"] else "",
            "answers": strings(self._get(scope, "answers")),
        }
        if "passages" in self.of:
            row |= self._passages(scope)
        else:
            row["context"] = self._get(scope, "context")
        if "id" in self.of:
            row["_id"] = self._get(scope, "id")
        for field in ("gold_passages", "documents"):
            if field in self.of:
                row[field] = self._get(scope, field)
        return row

    def _passages(self, scope: Scope) -> dict[str, Any]:
        inside = {field: self.of.get(field, "") for field in ("title", "body", "supports")}
        found = passages(self._get(scope, "passages"), **inside)
        gold = [number for number, passage in enumerate(found) if passage.supports]
        if "gold_titles" in self.of:
            titles = _titles(self._get(scope, "gold_titles"), self.of.get("title", ""))
            gold = [number for number, passage in enumerate(found) if passage.title in titles]
        context = "\n".join(_shown(number, p) for number, p in enumerate(found, start=1))
        return {"context": context} | ({"gold_passages": gold} if gold else {})

    def _get(self, scope: Scope, field: str) -> Any:
        found = find(scope, self.of[field])
        if found is MISSING:
            names = ", ".join(dict.fromkeys(name for values in scope for name in values))
            raise DataError(
                f"no column {self.of[field]!r} for {field!r}; there are: {names}",
                hint="`columns=FIELD=COLUMN,...` says which column a field is in",
            )
        return found


#: Rows whose columns are those of LongBench.
LONGBENCH_COLUMNS = Columns({})


def parse_columns(text: str) -> Columns:
    """Read ``NAME``, ``FIELD=COLUMN,...``, both (``squad,id=key``), or the path of a YAML file.

    Fields that are not named are those of the mapping called NAME, else LongBench's. Raises
    ConfigError for a field or a name that there is not.
    """
    of: dict[str, str] = {}
    for item in text.split(","):
        field, given, column = item.strip().partition("=")
        if given:
            of[_known(field.strip())] = column.strip()
        elif Path(field).suffix in (".yaml", ".yml"):
            of |= _read(Path(field))
        else:
            of |= _named(field)
    return Columns(_complete(of))


def _named(name: str) -> dict[str, str]:
    if name not in NAMED:
        raise ConfigError(
            f"`columns` {name!r}: no mapping is called that",
            hint=f"{closest(name, NAMED)}; or {_FORM}",
        )
    return dict(pair.split("=", 1) for pair in NAMED[name].split(","))


def _read(path: Path) -> dict[str, str]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"`columns` {path}: {reason}", hint=_FORM) from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ConfigError(f"`columns` {path}: not a map of fields to columns", hint=_FORM)
    base = _named(found.pop("like")) if "like" in found else {}
    return base | {_known(str(field)): column for field, column in found.items()}


def _known(field: str) -> str:
    if field not in FIELDS:
        raise ConfigError(f"`columns` {field!r}: no such field", hint=closest(field, FIELDS))
    return field


def _complete(of: Mapping[str, str]) -> dict[str, str]:
    if "context" in of and "passages" in of:
        # The later of the two was meant, where a named mapping has the other.
        last = [field for field in of if field in ("context", "passages")][-1]
        of = {field: path for field, path in of.items() if field in (last, *_others())}
    needed = (field for field in _NEEDED if field != "context" or "passages" not in of)
    return {field: field for field in needed} | dict(of)


def _others() -> list[str]:
    return [field for field in FIELDS if field not in ("context", "passages")]


def _scopes(scope: Scope, each: str) -> Iterator[Scope]:
    if not each:
        yield scope
        return
    name, _, rest = each.partition(".")
    elements = unpacked(scope[0].get(name))
    if not isinstance(elements, list) or not all(isinstance(e, dict) for e in elements):
        raise DataError(
            f"column {name!r} of 'each' is no list of objects; there are: {', '.join(scope[0])}",
            hint="`columns=each=COLUMN`",
        )
    for element in elements:
        yield from _scopes([element, *scope], rest)


def _titles(value: Any, title: str) -> set[str]:
    """Titles in a list of them, of (title, sentence) pairs or of objects, or in an object."""
    value = unpacked(value)
    if isinstance(value, dict):
        value = value.get(title or "title", [])
    found = value if isinstance(value, list) else []
    return {
        str(one[0] if isinstance(one, list) else one.get(title) if isinstance(one, dict) else one)
        for one in found
        if one
    }


def _shown(number: int, passage: ContextPassage) -> str:
    """A passage in LongBench's form."""
    title = f"{passage.title}\n" if passage.title else ""
    return f"Passage {number}:\n{title}{passage.body}"
