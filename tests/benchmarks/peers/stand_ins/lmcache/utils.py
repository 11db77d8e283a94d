from enum import Enum


class EngineType(Enum):
    VLLM = "vllm"
