"""One layer of an engine's paged KV cache, as strided views of the engine's own memory."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor

from lwkv.errors import ConfigError, LayoutError

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one rank keeps of a token in one layer.

    Args:
        num_kv_heads: K (and V) heads of this rank; 1 with `use_mla`.
        head_size: elements of one head; with `use_mla` the whole row (latent and rope part together).
        block_size: tokens of one block of the *registered tensor*. Where the engine's manager joins several
            of the tensor's blocks to one of its own, this is the smaller number: slots stay the same.
        use_mla: the row holds one latent vector instead of K and V.

    Raises:
        LayoutError: what is no whole number of 1 or more, or `use_mla` with more than one head.
    """

    num_kv_heads: int
    head_size: int
    block_size: int
    use_mla: bool = False

    def __post_init__(self) -> None:
        numbers = (self.num_kv_heads, self.head_size, self.block_size)
        if not all(type(n) is int and n >= 1 for n in numbers):
            raise LayoutError(f"{self}: heads, head size and block size must be whole numbers of 1 or more")
        if self.use_mla and self.num_kv_heads != 1:
            raise LayoutError(f"{self}: with use_mla a token has one row, so num_kv_heads must be 1")


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """One layer's paged KV. Row r is `k[r // block_size, r % block_size]`, and the same of `v`.

    A page of this layer, in host memory or staging, is packed [parts, rows, heads, width]: all K rows of the
    chunk in token order, then all V rows. In a row, head by head, the elements' bytes as the engine keeps
    them (little-endian on every supported machine). A partial chunk has fewer rows, and V follows right after
    the K rows there are. MLA and opaque blocks have one part.

    Args:
        name: as the engine registered it.
        dtype: as registered; the views below are integers of the same size, so that NaN payloads and fp8
            stay raw bytes.
        k, v: [num_blocks, block_size, heads, width], in the engine's memory. Any strides, but 1 in `width`
            on devices other than the CPU.
            `v` is None with MLA and where opaque blocks hold both. Opaque: [num_blocks, 1, 1, elements].
        page_format: "canonical", or "opaque:<shape of a block>:<block size>:<tag>".
        tokens_per_row: 1; the block size where a row is a whole opaque block.
    """

    name: str
    dtype: torch.dtype
    k: Tensor
    v: Tensor | None = None
    _: KW_ONLY
    page_format: str = "canonical"
    tokens_per_row: int = 1

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def width(self) -> int:
        """Elements of one head in a row."""
        return self.k.shape[3]

    @property
    def parts(self) -> int:
        return 1 if self.v is None else 2

    @property
    def page_kind(self) -> str:
        """What the bytes of a page are, in words that enter keys."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.page_format}:{dtype}:{self.parts}x{self.row_bytes}"

    @cached_property
    def num_rows(self) -> int:
        """Rows that can be addressed, 0 up to this number."""
        return self.k.shape[0] * self.k.shape[1]

    @cached_property
    def row_bytes(self) -> int:
        return self.heads * self.width * self.k.element_size()

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What layers have in common that differ only in where they are, by a multiple of 16 bytes."""
        views = [self.k] if self.v is None else [self.k, self.v]
        places = ((*view.shape, *view.stride(), view.data_ptr() % 16) for view in views)
        return self.dtype, self.device, self.tokens_per_row, *places

    def page_bytes(self, num_tokens: int) -> int:
        """Bytes of a page of `num_tokens` tokens. Raises ConfigError if opaque blocks do not divide them."""
        if num_tokens % self.tokens_per_row:
            raise ConfigError(
                f"layer {self.name!r} moves whole blocks of {self.tokens_per_row} tokens: "
                f"chunk_size must be a multiple of that, got {num_tokens}"
            )
        return self.parts * (num_tokens // self.tokens_per_row) * self.row_bytes

    @cached_property
    def words(self) -> list[Tensor]:
        """k, and v if there is one, as the widest integers, 8 bytes at most, that all of them can be.

        What counts are their sizes, strides and addresses.
        """
        views = [self.k] if self.v is None else [self.k, self.v]
        size = min(_word_bytes(view) for view in views)
        return [view.view(WORDS[size]) for view in views]


def _word_bytes(view: Tensor) -> int:
    element = view.element_size()
    if view.stride(-1) != 1:
        return element
    steps = (view.storage_offset(), view.shape[-1], *view.stride()[:-1])
    multiples = [view.data_ptr(), *(n * element for n in steps)]
    return next(size for size in (8, 4, 2, 1) if all(n % size == 0 for n in multiples))
