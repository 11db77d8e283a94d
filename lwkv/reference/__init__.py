"""A small paged transformer and the serving engine around it, which drives lwkv as vLLM would."""

from __future__ import annotations

from lwkv.reference.blocks import BlockAllocator
from lwkv.reference.cache import LAYOUTS, PagedCache
from lwkv.reference.connect import describe_model, open_cache_engine
from lwkv.reference.document import QUESTIONS, document_prompt, read_document
from lwkv.reference.engine import ReferenceEngine, generate
from lwkv.reference.forward import LayerMark, forward
from lwkv.reference.hooks import KVSteps, NoCache, StepOutcome
from lwkv.reference.model.llama import Model
from lwkv.reference.model.random_model import random_model
from lwkv.reference.model.rope import inverse_frequencies
from lwkv.reference.model.shape import ModelShape, RopeScaling
from lwkv.reference.model_files.gguf_file import GGUFFile, load_gguf
from lwkv.reference.model_files.hf_folder import load_hf_folder
from lwkv.reference.model_files.smollm2 import chat_prompt, find_smollm2, load_smollm2
from lwkv.reference.model_files.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from lwkv.reference.request import Answer, Prompt
from lwkv.reference.scheduler import Limits, Lookup

__all__ = [
    "LAYOUTS",
    "QUESTIONS",
    "Answer",
    "BlockAllocator",
    "GGUFFile",
    "KVSteps",
    "LayerMark",
    "Limits",
    "Lookup",
    "Model",
    "ModelShape",
    "NoCache",
    "PagedCache",
    "Prompt",
    "ReferenceEngine",
    "RopeScaling",
    "StepOutcome",
    "Tokenizer",
    "chat_prompt",
    "describe_model",
    "document_prompt",
    "find_smollm2",
    "forward",
    "generate",
    "inverse_frequencies",
    "load_gguf",
    "load_hf_folder",
    "load_smollm2",
    "open_cache_engine",
    "random_model",
    "read_document",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]
