"""SGLang's KV events are about the pages on its device, computed there or loaded by lwkv."""

from __future__ import annotations

from pathlib import Path

from integrations.in_sglang.kv_events import Router, pages_of
from integrations.in_sglang.prompts import DOCUMENTS
from integrations.in_sglang.rig import PAGE, started, with_lwkv
from integrations.in_sglang.test_engines import WHOLE, Expected, require_right


def test_a_loaded_page_is_announced_as_the_computed_one_was(
    llama: Path, expected: Expected, tmp_path: Path
) -> None:
    """By the same hash, behind the same page; what is stored in host memory is not announced at all.

    This engine has no overlap schedule, other than those of the other tests with pages of this size.
    """
    pages = WHOLE // PAGE
    with (
        Router(tmp_path) as router,
        started(
            llama, kv_events_config=router.config, disable_overlap_schedule=True, **with_lwkv()
        ) as engine,
    ):
        assert router.hear().stored == []
        (answer,) = engine.ask(DOCUMENTS[0])
        computed = router.hear(least=pages)
        assert [page.tokens for page in computed.stored][:pages] == pages_of(DOCUMENTS[0][0], PAGE)
        assert [page.parent for page in computed.stored][1:] == [page.hash for page in computed.stored][:-1]
        engine.flush()
        assert router.hear().cleared == 1
        (loaded,) = engine.ask(DOCUMENTS[0])
        assert (loaded.from_device, loaded.from_host) == (0, WHOLE)
        assert answer.tokens == loaded.tokens
        require_right([loaded], DOCUMENTS[0], expected)
        again = router.hear(least=pages)
        assert again.stored == computed.stored
        assert (again.removed, again.cleared) == ([], 0)
        assert computed.media == again.media == {"GPU"}
