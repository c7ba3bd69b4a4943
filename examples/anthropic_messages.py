"""Ask about text files with the anthropic package, then again with the files in another order.

picbench serve smollm2 --parts documents
python examples/anthropic_messages.py http://127.0.0.1:8000 smollm2 "Who wrote it?" notes/*.txt
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from anthropic import Anthropic


def ask(url: str, model: str, question: str, documents: Sequence[str]) -> str:
    """The answer, and how much of the prompt was reused."""
    parts = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}
        for text in documents
    ]
    answer = Anthropic(base_url=url, api_key="none").messages.create(
        model=model,
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],
        max_tokens=8,
    )
    usage = answer.usage
    reused = usage.cache_read_input_tokens or 0
    prompt = reused + (usage.cache_creation_input_tokens or 0) + usage.input_tokens
    return f"{answer.content[0].text!r}: {reused} of {prompt} tokens reused"


if __name__ == "__main__":
    server, name, asked, *files = sys.argv[1:]
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    print(ask(server, name, asked, texts))
    print(ask(server, name, asked, texts[::-1]))
