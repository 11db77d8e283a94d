"""Whatever SGLang does: right bytes, every hit that there can be, and nothing moved that need not be."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrations.sglang.fake_sglang import FakeSGLang
from integrations.sglang.test_link import counted, num_bytes
from oracle import require_rest

PAGE = 3
DOCUMENTS = [list(range(base, base + 20)) for base in (100, 200)]
PROMPTS = st.builds(
    lambda document, length, suffix: [*DOCUMENTS[document][:length], 300 + suffix, *range(400, 400 + suffix)],
    st.sampled_from([0, 1]),
    st.integers(0, 20),
    st.sampled_from([0, 1, 4]),
)
STEPS = st.one_of(
    st.tuples(st.just("run"), st.lists(PROMPTS, min_size=1, max_size=3)),
    st.tuples(st.just("evict"), st.integers(1, 6)),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("look up and go"), PROMPTS),
    st.tuples(st.just("cancel"), PROMPTS),
)


class Model:
    """What a linker with room for everything has, and what it must have moved, in pages."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.loaded = self.stored = 0

    def hits(self, wanted: list[str]) -> int:
        """The leading ones of the pages wanted that were ever given away."""
        return next((i for i, key in enumerate(wanted) if key not in self.kept), len(wanted))

    def keep(self, hashes: list[str]) -> None:
        new = set(hashes) - self.kept
        self.stored += len(new)
        self.kept |= new


@settings(
    max_examples=min(25, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(script=st.lists(STEPS, min_size=2, max_size=8))
def test_any_script_is_answered_right_with_all_hits_and_no_needless_byte(
    make: Callable[..., FakeSGLang], script: list[tuple[str, object]]
) -> None:
    sglang = make(page=PAGE, device_pages=64, pages=3 * 100, forgets=False)
    model = Model()
    with counted(sglang, "load_batch") as loads, counted(sglang, "save_batch") as saves:
        for step, argument in script:
            play(sglang, model, step, argument)
        sglang.tick()
    page_bytes = sglang.engine.connector.page_bytes * sglang.oracle.dims.layers
    assert num_bytes(loads) == model.loaded * page_bytes
    assert num_bytes(saves) == model.stored * page_bytes
    assert all(sglang.results)
    sglang.link.reset()
    require_rest(sglang.engine)
    sglang.oracle.check()


def play(sglang: FakeSGLang, model: Model, step: str, argument: object) -> None:
    if step == "evict":
        sglang.evict(argument)  # type: ignore[arg-type]
    elif step == "flush":
        sglang.flush()
    elif step == "run":
        for prompt in sglang.run(*argument):  # type: ignore[misc]
            usable = prompt.hashes[prompt.from_device : (len(prompt.tokens) - 1) // PAGE]
            assert prompt.from_host == model.hits(usable)
            model.loaded += prompt.from_host
        for tokens in argument:  # type: ignore[attr-defined]
            model.keep(sglang.prompt(tokens).hashes)
    else:
        prompt = sglang.prompt(argument)  # type: ignore[arg-type]
        sglang.match(prompt)
        if step == "cancel" and prompt.from_host:
            sglang.admit(prompt)
            assert sglang.link.cancel_queued_load(prompt.rid)
            sglang.free += prompt.pages[prompt.from_device :]
