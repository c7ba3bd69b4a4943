"""What Hugging Face's own model replies to the testbed's rows, decoded greedily."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from picbench.errors import ConfigError
from picbench.kernels.first_calls import settle_first_calls
from picbench.names import closest
from picbench.output import provenance
from picbench.output.json_file import write_json
from picbench.output.sample_row import hash_tokens
from picbench.workloads.testbed import DATASETS, MAX_TOKENS, answer, rows
from picbench.workloads.testbed.lm.files import device_name
from picbench.workloads.testbed.lm.judge import tokens_of
from picbench.workloads.testbed.testbed_prompt import dataset
from picbench.workloads.testbed.testbed_tokenizer import Coder

#: Rows of a batch on a GPU and elsewhere.
_AT_ONCE = {"cuda": 100, "cpu": 4}


class HuggingFaceModel:
    """Hugging Face's Llama with the testbed's weights."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        settle_first_calls()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(self.device).eval()
        self._coder = Coder(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def replies(self, name: str, count: int) -> Iterator[dict[str, Any]]:
        """Yield the reply to each of the first `count` rows of a data set, and its score."""
        found = [(row, self._prompt(row)) for row in rows(name, count=count)]
        found.sort(key=lambda item: len(item[1]))
        size = _AT_ONCE[self.device.type]
        for start in range(0, len(found), size):
            group = found[start : start + size]
            texts = self._generate([ids for _, ids in group], MAX_TOKENS[name])
            for (row, ids), text in zip(group, texts, strict=True):
                yield {
                    "dataset": name,
                    "sample": row["_id"],
                    "prompt_sha256": hash_tokens(ids),
                    "text": text,
                    "score": dataset(name).score(answer(name, text), row["answers"]),
                }

    def _prompt(self, row: dict[str, Any]) -> list[int]:
        tokens = tokens_of(row, self._coder)
        return [*tokens.head, *(token for chunk in tokens.chunks for token in chunk), *tokens.tail]

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], limit: int) -> list[str]:
        """Decode a batch that is padded on the left."""
        longest = max(map(len, prompts))
        pads = [longest - len(ids) for ids in prompts]
        padded = [[self._coder.eos] * pad + [*ids] for pad, ids in zip(pads, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        said = self._model.generate(
            torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=limit,
            do_sample=False,
        )
        return [self._coder.decode(row) for row in said[:, longest:].tolist()]


def collect(folder: Path, dtype: str, datasets: Sequence[str], count: int, output: Path) -> None:
    """Write the replies to the first `count` rows of each data set, and what made them, as JSON."""
    for name in datasets:
        if name not in DATASETS:
            raise ConfigError(f"`dataset` {name}: no such data set", hint=closest(name, DATASETS))
    model = HuggingFaceModel(folder, getattr(torch, dtype))
    found = [reply for name in datasets for reply in model.replies(name, count)]
    versions = provenance.facts("torch", "transformers", "tokenizers")
    device = device_name(model.device)
    write_json(output, {"dtype": dtype, "device": device, "versions": versions, "replies": found})
