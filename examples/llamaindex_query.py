"""Ask about text files with a LlamaIndex query engine, then again with the files in another order.

    picbench serve smollm2 --marks on
    python examples/llamaindex_query.py http://127.0.0.1:8000 smollm2 "Who wrote it?" notes/*.txt

Each document's template puts marks around its text. LlamaIndex's package for OpenAI's API needs an
older openai than vLLM does, so the model is a class of its own, as LlamaIndex's pages describe.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core import Document, PromptTemplate, SummaryIndex
from llama_index.core.llms import CompletionResponse, CompletionResponseGen, CustomLLM, LLMMetadata
from openai import OpenAI


class ServedModel(CustomLLM):
    """A model of an OpenAI server; `reused` says how much of its last prompt was."""

    url: str
    model: str
    reused: str = ""

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex fits prompts into."""
        return LLMMetadata(context_window=4096, num_output=8, model_name=self.model)

    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        """Answer a prompt."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none")
        messages = [{"role": "user", "content": prompt}]
        answer = client.chat.completions.create(
            model=self.model, messages=messages, temperature=0, max_tokens=8
        )
        usage = answer.usage
        self.reused = f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens}"
        return CompletionResponse(text=answer.choices[0].message.content)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **_: Any
    ) -> CompletionResponseGen:
        """Answer a prompt in one piece."""
        yield self.complete(prompt)


def ask(model: ServedModel, question: str, files: Sequence[Path]) -> str:
    """The answer, and how much of the prompt was reused."""
    documents = [
        Document(
            text=file.read_text(encoding="utf-8"),
            metadata={"file": file.name},
            text_template="<<doc>>{metadata_str}\n{content}<</doc>>",
        )
        for file in files
    ]
    index = SummaryIndex.from_documents(documents)
    template = PromptTemplate("{context_str}\n{query_str}")
    answer = index.as_query_engine(llm=model, text_qa_template=template).query(question)
    return f"{str(answer)!r}: {model.reused} tokens reused"


if __name__ == "__main__":
    server, name, asked, *files = sys.argv[1:]
    found = [*map(Path, files)]
    served = ServedModel(url=server, model=name)
    print(ask(served, asked, found))
    print(ask(served, asked, found[::-1]))
