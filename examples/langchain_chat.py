"""Asks a running server through LangChain: a prompt, the model and a parser as one chain, streamed and in a batch.

Start ``hiserve serve`` and run ``python examples/langchain_chat.py [URL]``; needs ``pip install langchain-openai``.
"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Runs the chain."""
    prompt = ChatPromptTemplate([("user", "I would like to order {order}, please.")])
    model = ChatOpenAI(
        model="hiserve-nano", base_url=f"{url}/v1", api_key="none", temperature=0, max_completion_tokens=48
    )
    chain = prompt | model | StrOutputParser()
    for piece in chain.stream({"order": "a small latte"}):
        print(piece, end="", flush=True)
    print()
    for reply in chain.batch([{"order": "two muffins"}, {"order": "a taxi"}]):
        print(reply)


if __name__ == "__main__":
    main(*sys.argv[1:])
