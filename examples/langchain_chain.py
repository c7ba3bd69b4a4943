"""Ask about text files with a LangChain chain, then again with the files in another order.

    picbench serve smollm2 --marks on
    python examples/langchain_chain.py http://127.0.0.1:8000 smollm2 "Who wrote it?" notes/*.txt

The chain is LangChain's own; only the function that joins the documents puts marks around each.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def join(documents: Sequence[Document]) -> str:
    """The documents, each of which the server takes as a chunk."""
    return "\n".join(f"<<doc>>{document.page_content}<</doc>>" for document in documents)


def ask(url: str, model: str, question: str, documents: Sequence[Document]) -> str:
    """The answer, and how much of the prompt was reused."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from the documents."), ("human", "{documents}\n\n{question}")]
    )
    model_of_server = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8
    )
    answer = (prompt | model_of_server).invoke({"documents": join(documents), "question": question})
    usage = answer.usage_metadata
    reused = usage["input_token_details"]["cache_read"]
    return f"{answer.content!r}: {reused} of {usage['input_tokens']} tokens reused"


if __name__ == "__main__":
    server, name, asked, *files = sys.argv[1:]
    found = [Document(Path(file).read_text(encoding="utf-8")) for file in files]
    print(ask(server, name, asked, found))
    print(ask(server, name, asked, found[::-1]))
