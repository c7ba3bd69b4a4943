"""Ask about text files with the openai package, then again with the files in another order.

    picbench serve smollm2 --parts documents
    python examples/openai_chat.py http://127.0.0.1:8000 smollm2 "Who wrote it?" notes/*.txt

Each document is a part of the message, and nothing else is special.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def ask(url: str, model: str, question: str, documents: Sequence[str]) -> str:
    """The answer, and how much of the prompt was reused."""
    parts = [{"type": "document", "document": {"content": text}} for text in documents]
    answer = OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],
        temperature=0,
        max_tokens=8,
    )
    usage = answer.usage
    reused = usage.prompt_tokens_details.cached_tokens
    return f"{answer.choices[0].message.content!r}: {reused} of {usage.prompt_tokens} tokens reused"


if __name__ == "__main__":
    server, name, asked, *files = sys.argv[1:]
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    print(ask(server, name, asked, texts))
    print(ask(server, name, asked, texts[::-1]))
