"""Model folders of the tuned variants, built from the model and a delta."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from picbench.workloads.sources.cache_files import write_model
from picbench.workloads.testbed.lm.files import WEIGHTS, save_weights, variant_weights
from picbench.workloads.testbed.lm.recipes import LINKS_EACH
from picbench.workloads.testbed.testbed_tokenizer import LINKS, ids_of

_CONFIG = "config.json"
_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def build_variant(folder: Path, variant: str, parent: Path | None = None) -> Path:
    """Return a folder with the variant whose delta is in `folder`, built if it does not exist.

    It is in `parent` (default: the user's cache), named by its contents. Raises ConfigError when
    it cannot be written.
    """
    write = partial(_write, folder, variant)
    return write_model(f"testbed-{variant}", _fingerprint(folder, variant), write, parent)


def _fingerprint(folder: Path, variant: str) -> str:
    digest = hashlib.sha256()
    for name in (WEIGHTS, f"{variant}.delta", *_FILES):
        digest.update((folder / name).read_bytes())
    digest.update(_config(folder, variant).encode())
    return digest.hexdigest()[:12]


def _write(folder: Path, variant: str, made: Path) -> None:
    for name in _FILES:
        shutil.copyfile(folder / name, made / name)
    (made / _CONFIG).write_text(_config(folder, variant), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    save_weights(variant_weights(folder, tokenizer, variant), made)


def _config(folder: Path, variant: str) -> str:
    """A variant's config.json, which names the link tokens that it was trained with."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    if variant == "link":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config["link_token_ids"] = ids_of(tokenizer, LINKS)[:LINKS_EACH]
    return json.dumps(config, indent=2) + "\n"
