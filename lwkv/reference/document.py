"""The demo's document, a handbook of about 1000 tokens, and questions that SmolLM2 answers from it."""

from __future__ import annotations

from importlib.resources import files

from lwkv.reference.model_files.smollm2 import chat_prompt

# With the words a right answer contains.
QUESTIONS = {
    "What is the name of the supply boat?": "Patience",
    "What does a yellow flag mean?": "doctor",
}


def read_document() -> str:
    """Read the handbook's text."""
    return files("lwkv.reference").joinpath("document.txt").read_text(encoding="utf-8")


def document_prompt(question: str) -> str:
    """Write a chat about the handbook; prompts for all questions are equal up to the question."""
    return chat_prompt(f"{read_document()}\n{question}")
