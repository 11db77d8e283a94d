"""Blending of chats: documents between separators, as a client of vLLM's server writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integrations.in_vllm import models
from integrations.in_vllm.rig import Engine, started, with_lwkv
from integrations.in_vllm.test_blending import count, settle

DOCUMENTS = [
    "The harbour opens at five and closes when the last boat has come in, as it always has.",
    "A lamp with a green shade belongs to the pilot, one with a red shade to nobody that is known.",
    "Tides are written on the board beside the door, by the one who comes first on that day.",
]


def chat(engine: Engine, order: tuple[int, ...], question: str, extra: dict[str, Any] | None = None) -> str:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args=extra)
    parts = ["Answer from these documents.", *(DOCUMENTS[number] for number in order), question]
    message = {"role": "user", "content": " # # ".join(parts)}
    (output,) = engine.llm.chat([[message]], parameters, use_tqdm=False)
    return str(output.outputs[0].text)


def test_documents_of_a_chat_come_from_the_cache_in_another_order(tmp_path: Path) -> None:
    folder = models.written(models.write_talking_llama, tmp_path)
    settings = with_lwkv(enable_blending=True, blend_recompute_ratios=1.0, blend_min_tokens=64)
    with started(folder, skip_tokenizer_init=False, enable_prefix_caching=True, **settings) as engine:
        chat(engine, (0, 1, 2), "When?")
        assert count(engine, "segments_encoded") == 3
        settle(engine)
        blended = chat(engine, (2, 0, 1), "Whose lamp is it?")
        assert count(engine, "requests") == 1
        assert count(engine, "tokens_reused") > sum(map(len, DOCUMENTS)) - 40
        engine.forget()
        engine.evict_all()
        exact = chat(engine, (2, 0, 1), "Whose lamp is it?", {"kv_transfer_params": {"lwkv_segments": []}})
        assert blended == exact
        assert count(engine, "requests") == 1
        settle(engine)
        engine.at_rest()
