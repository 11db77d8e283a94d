"""SGLang's own pools and lwkv's linker, without an engine: prints each of PAGED_KINDS whose bytes were right.

For pools that no attention of SGLang reads on a CPU. What is stored from one set of slots is loaded to
another, and read through the pool, which waits for each layer as it does for a model.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import torch

LAYERS, PAGES = 3, 5
KINDS = ("nhd", "hnd", "fp8", "fp8 hnd", "mla", "mla fp8", "draft")
PAGED_KINDS = [f"{kind}, pages of {page}" for kind in KINDS for page in (1, 4, 16, 64)]
"""As KINDS, and how many tokens a page has."""


def main() -> None:
    failed = False
    for paged_kind in PAGED_KINDS:
        kind, page = paged_kind.split(", pages of ")
        try:
            try_kind(kind, int(page))
        except AssertionError:
            failed = True
            traceback.print_exc()
        else:
            print(paged_kind, flush=True)
    sys.exit(failed)


def try_kind(kind: str, page: int) -> None:
    os.environ["SGLANG_USE_HND_KVCACHE"] = "1" if "hnd" in kind else "0"
    num_slots = page * 4 * PAGES
    pool = make_pool(kind, LAYERS, num_slots, page)
    drafts = [make_pool(kind, 2, num_slots, page)] if kind == "draft" else []
    linker = make_linker(pool, drafts, page)
    pool.register_layer_transfer_counter(linker.layer_done_counter)
    everything = [tensor for each in (pool, *drafts) for tensor in tensors_of(each)]
    for number, tensor in enumerate(everything):
        random = torch.Generator().manual_seed(number)
        tensor.copy_(random_like(tensor, random))
    stored, loaded = slots_of(range(1, 1 + PAGES), page), slots_of(range(2 * PAGES, PAGES, -1), page)
    by_head = page if "hnd" in kind else None
    wanted = [rows(tensor, stored, by_head) for tensor in everything]
    store(linker, stored)
    for tensor in everything:
        tensor.zero_()
    batch = load(linker, loaded)
    for layer in range(LAYERS):
        read = [pool.get_key_buffer(layer)] + ([] if "mla" in kind else [pool.get_value_buffer(layer)])
        for part, tensor in enumerate(read):
            assert tensor.dtype == pool.dtype
            got = rows(tensor.view(pool.store_dtype), loaded, by_head)
            assert torch.equal(got, wanted[len(read) * layer + part]), (layer, part)
    assert linker.finish_layer_wise_loading(batch)
    assert linker.link.wait_idle(60)
    others = sorted(set(range(num_slots + page)) - set(loaded.tolist()))
    for tensor, expected in zip(everything, wanted, strict=True):
        assert torch.equal(rows(tensor, loaded, by_head), expected)
        assert not rows(tensor, torch.tensor(others), by_head).any()
    linker.close()


def make_pool(kind: str, layers: int, num_slots: int, page: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    dtype = torch.float8_e4m3fn if "fp8" in kind else torch.bfloat16
    common = {"layer_num": layers, "device": "cpu", "enable_memory_saver": False}
    if "mla" in kind:
        return MLATokenToKVPool(num_slots, page, dtype, kv_lora_rank=24, qk_rope_head_dim=8, **common)
    return MHATokenToKVPool(num_slots, page, dtype, head_num=2, head_dim=8, **common)


def make_linker(pool: Any, drafts: list[Any], page: int) -> Any:
    from lwkv.integrations.sglang import LWKVLinker

    params = SimpleNamespace(
        page_size=page,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        mtp_draft_device_pools=drafts,
        sidecar_draft_device_pools=[],
        attn_cp_size=1,
        pp_size=1,
    )
    arguments = SimpleNamespace(model_path="some/model", served_model_name="some", enable_metrics=False)
    return LWKVLinker(arguments, params, components=[], extra_config={"max_local_cpu_size": 0.05})


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """All layers' K and V, or the one that a layer has."""
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [tensor for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for tensor in pair]


def random_like(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    count = tensor.nbytes
    return torch.randint(256, (count,), generator=random).byte().view(tensor.dtype).view(tensor.shape)


def slots_of(numbers: range, page: int) -> torch.Tensor:
    return torch.cat([torch.arange(number * page, (number + 1) * page) for number in numbers])


def rows(tensor: torch.Tensor, slots: torch.Tensor, by_head: int | None) -> torch.Tensor:
    """The bytes of these slots, a copy; `by_head` is the page of a pool with heads before tokens."""
    found = tensor[slots] if by_head is None else tensor[slots // by_head, :, slots % by_head]
    return found.contiguous().view(torch.uint8)


def transfer(slots: torch.Tensor | None = None) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    hashes = [hashlib.sha256(bytes([page])).hexdigest() for page in range(PAGES)]
    return PoolTransfer(name=PoolName.KV, keys=hashes, device_indices=slots)


def store(linker: Any, slots: torch.Tensor) -> None:
    assert linker.offload([transfer(slots)])
    linker.num_completed_offloads()
    assert linker.link.wait_idle(60)
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload()


def load(linker: Any, slots: torch.Tensor) -> int:
    assert max(linker.lookup("a request", [transfer()])) == PAGES
    assert linker.load("a request", [transfer(slots)])
    batch: int = linker.start_layer_wise_loading()
    assert batch >= 0
    linker.layer_done_counter.set_consumer(batch)
    return batch


if __name__ == "__main__":
    main()
