"""Other models than Gemma 3: gpt-oss with its sinks, Llama 4 with chunked local attention, Gemma 3n, of whose
layers the last ones have no KV of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, CHUNK, Engine, assert_same, prompt, started, with_lwkv

from lwkv.cli.doctor.model import read_folder
from lwkv.integrations.vllm.hybrid.groups import read_groups
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups
from lwkv.kinds.model_config import read_model

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has all layers in one group here"
)

SPAN = 128
"""Two chunks."""
WRITERS = {
    "gpt-oss": models.write_gpt_oss,
    "llama 4": models.write_llama4,
    "gemma 3n": models.write_gemma3n,
}
KINDS = {
    "gpt-oss": [("window-128", 2), ("full", 2)],
    "llama 4": [("local-128", 2), ("full", 2)],
    # Of its six layers the last two look at the KV of earlier ones.
    "gemma 3n": [("window-128", 2), ("full", 2)],
}


@pytest.fixture(scope="module", autouse=True)
def _local_attention_has_groups() -> Iterator[None]:
    """Without this, vLLM has all layers of Llama 4 in one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
        yield


@pytest.fixture(scope="module", params=[*WRITERS])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.written(WRITERS[name], tmp_path_factory.mktemp("model"), SPAN)


@pytest.fixture(scope="module")
def computed(model: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(model, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Engine]:
    arguments = {"max_num_batched_tokens": 300, "max_num_seqs": 4}
    with started(model, **arguments, **with_lwkv()) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.forget()
    shared.new_hits()
    yield shared
    shared.groups_at_rest()


def test_the_kinds_are_found_and_are_those_that_doctor_reads_from_the_model_s_folder(
    engine: Engine, name: str, model: Path
) -> None:
    groups = read_groups(engine.core.scheduler.kv_cache_config, CHUNK)
    assert [(kind.name, kind.num_layers) for kind in groups.kinds] == KINDS[name]
    assert read_model(read_folder(str(model)), BLOCK).kinds == groups.kinds


@pytest.mark.parametrize("length", [CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 32, 4 * CHUNK, 700])
def test_the_first_answer_is_computed_and_the_second_loaded(
    engine: Engine, computed: Elsewhere, length: int
) -> None:
    prompts = [prompt(3000 + length, length)]
    for hits in (0, (length - 1) // CHUNK * CHUNK):
        assert_same(engine.ask(prompts), computed.ask(prompts))
        assert engine.new_hits() == hits
        engine.forget()


@pytest.mark.parametrize("own", [32, CHUNK, 160, 384])
def test_lwkv_gives_what_vllm_lacks(engine: Engine, computed: Elsewhere, own: int) -> None:
    ids = prompt(3100, 500)
    engine.ask([ids])
    engine.forget()
    engine.ask([[*ids[:own], 501]])
    (answer,) = answers = engine.ask([ids])
    assert_same(answers, computed.ask([ids]))
    assert answer.cached == 448


def test_hits_misses_and_turns_of_a_conversation_in_one_batch(engine: Engine, computed: Elsewhere) -> None:
    first = engine.ask([prompt(3200, 400), prompt(3201, 330)], 16)
    engine.forget()
    engine.new_hits()
    prompts = [
        prompt(3200, 400) + first[0].tokens + prompt(3202, 90),
        prompt(3203, 350),
        prompt(3201, 330) + first[1].tokens,
        prompt(3200, 200) + prompt(3204, 64),
    ]
    assert_same(engine.ask(prompts), computed.ask(prompts))
    assert engine.new_hits() >= 384 + 320
