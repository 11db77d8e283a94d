"""From what an engine registers to PagedLayers: by shape, strides and spec, never by version or guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lwkv.errors import LayoutError
from lwkv.layouts.paged_layer import WORDS, KVSpec, PagedLayer
from lwkv.layouts.registration import Registration, Tensors, picture, place, read_registered

__all__ = ["LAYOUTS", "KVSpec", "Layout", "PagedLayer", "describe_layers"]

_AXES = (
    "2 is K, then V; B a block; N a token of the block; H a head; D an element of a head; 2D K's, then V's; "
    "slots are B and N in one"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to keep a layer, as the axes of its tensors.

    Axes: 2 = K, then V; B = block; N = token of the block; S = slot, B and N in one; H = head; D = element
    of a head; E = D of K, then D of V.

    With `k_transposed` the NE elements of a block's head are all of K as DN, then all of V as ND, whatever
    the shape says. That cannot be seen, so the layout is never assumed. For the CPU only, whose kernels take
    any strides.
    """

    name: str
    axes: str
    tensors: int = 1
    mla: bool = False
    k_transposed: bool = False

    def differences(self, tensor: Tensor, spec: KVSpec) -> list[str]:
        """What is wrong with the sizes of a tensor that has the axes of this layout, axis by axis."""
        wanted = {
            "2": (2, "K and V"),
            "N": (spec.block_size, "block_size"),
            "H": (spec.num_kv_heads, "num_kv_heads"),
            "D": (spec.head_size, "head_size"),
            "E": (2 * spec.head_size, "2 * head_size"),
        }
        found = [
            f"{'2D' if axis == 'E' else axis} is {n} in the tensor, {wanted[axis][1]} is {wanted[axis][0]}"
            for axis, n in zip(self.axes, tensor.shape, strict=True)
            if axis in wanted and n != wanted[axis][0]
        ]
        if "S" in self.axes and tensor.shape[0] % spec.block_size:
            found.append(f"{tensor.shape[0]} slots are no multiple of block_size, {spec.block_size}")
        return found

    def views(self, tensors: Sequence[Tensor], spec: KVSpec) -> list[Tensor]:
        """K and V, or the one there is with MLA, as [blocks, tokens, heads, elements]; for what fits."""
        if self.k_transposed:
            return _transposed(tensors[0], spec)
        if "2" in self.axes:
            tensors = tensors[0].unbind(self.axes.index("2"))
        elif "E" in self.axes:
            tensors = tensors[0][..., : spec.head_size], tensors[0][..., spec.head_size :]
        axes = self.axes.replace("2", "").replace("E", "D")
        return [_to_bnhd(t, axes, spec.block_size) for t in tensors]

    def __str__(self) -> str:
        words = {"E": "2D", "S": "slots"}
        pair = "" if self.tensors == 1 else " for K and for V"
        return f"{self.name} ({', '.join(words.get(axis, axis) for axis in self.axes)}){pair}"


LAYOUTS = (
    Layout("vllm_2bnhd", "2BNHD"),
    Layout("vllm_b2nhd", "B2NHD"),
    Layout("vllm_2bhnd", "2BHND"),
    Layout("vllm_b2hnd", "B2HND"),
    Layout("vllm_bhn2d", "BHNE"),
    Layout("vllm_cpu_vec", "BHNE", k_transposed=True),
    Layout("vllm_mla", "BND", mla=True),
    Layout("vllm_mla", "BHND", mla=True),
    Layout("sglang_kv", "SHD", tensors=2),
    Layout("sglang_kv_hnd", "BHND", tensors=2),
    Layout("sglang_mla", "SHD", mla=True),
)


def describe_layers(
    kvcaches: Registration,
    spec: KVSpec | Mapping[str, KVSpec],
    layout: str | None = None,
    opaque_tag: str | None = None,
) -> list[PagedLayer]:
    """Describe every registered layer, in the caller's order, without copying a byte.

    Without `layout` each layer takes the one layout that its shape and spec allow. A layer registered a
    second time under another name (layers that share their KV) is left out, with a log line.

    Args:
        kvcaches: one tensor a layer, or its K and V tensors, alike in shape and strides, all on one device. A
            sequence's layers are named layer_0, layer_1 and so on.
        spec: of all layers, or one for each name where they differ.
        layout: a name of LAYOUTS, which every layer must then fit; or "opaque": dimension 0 counts blocks
            and the bytes of a block mean nothing to us. Never assumed.
        opaque_tag: with "opaque", what else decides the bytes of a block, such as backend and ISA.

    Raises:
        LayoutError: no layout fits, or several that differ; memory that overlaps itself, is not dense in its
            last dimension or lies elsewhere; a dtype, name or combination that is not supported.
    """
    known = [entry for entry in LAYOUTS if layout in (_unasked(entry), entry.name)]
    if not known and layout != "opaque":
        names = [*dict.fromkeys(entry.name for entry in LAYOUTS), "opaque"]
        raise LayoutError(f"no layout {layout!r}; there are {', '.join(names)}")
    if (layout == "opaque") != (opaque_tag is not None):
        raise LayoutError(f"layout='opaque' and opaque_tag= go together, got {layout!r} and {opaque_tag!r}")
    registered = read_registered(kvcaches)
    specs = spec if isinstance(spec, Mapping) else dict.fromkeys(registered, spec)
    if missing := [name for name in registered if name not in specs]:
        raise LayoutError(f"no spec for layers {missing}; give each layer its own, or one KVSpec for all")
    describe = partial(_canonical, known=known) if known else partial(_opaque, tag=opaque_tag)
    return [describe(name, tensors, specs[name]) for name, tensors in registered.items()]


def _canonical(name: str, tensors: Tensors, spec: KVSpec, known: Sequence[Layout]) -> PagedLayer:
    raw = _integers(tensors)
    right = (spec.use_mla, len(raw), raw[0].dim())
    alike = [entry for entry in known if (entry.mla, entry.tensors, len(entry.axes)) == right]
    differ = {entry: entry.differences(raw[0], spec) for entry in alike}
    fitting = [entry for entry, differences in differ.items() if not differences]
    views = [entry.views(raw, spec) for entry in fitting]
    found = {tuple(map(place, view)): view for view in views}
    if len(found) == 1:
        return PagedLayer(name, tensors[0].dtype, *found.popitem()[1])
    shown = f"{picture(name, tensors)} with {spec}"
    if fitting:
        names = "; ".join(map(str, fitting))
        raise LayoutError(f"{shown} can be any of {names}: declare which with layout=. {_AXES}")
    names = "; ".join(map(str, known))
    raise LayoutError(
        f"{_nearest(name, differ)}{shown} is not {names}: correct the spec or the layout, "
        f"or declare layout='opaque' and opaque_tag= for blocks whose bytes need not be understood. {_AXES}"
    )


def _nearest(name: str, differ: Mapping[Layout, list[str]]) -> str:
    """The layout that differs in the fewest axes, and in which; nothing where none has these axes."""
    nearest = min(differ, key=lambda entry: len(differ[entry]), default=None)
    if nearest is None:
        return ""
    return f"layer {name!r} is nearest to {nearest}, but {' and '.join(differ[nearest])}. In full: "


def _opaque(name: str, tensors: Tensors, spec: KVSpec, tag: str | None) -> PagedLayer:
    rows = [_block_rows(name, t) for t in _integers(tensors)]
    shapes = "+".join("x".join(map(str, t.shape[1:])) for t in tensors)
    page_format = f"opaque:{shapes}:{spec.block_size}:{tag}"
    return PagedLayer(name, tensors[0].dtype, *rows, page_format=page_format, tokens_per_row=spec.block_size)


def _block_rows(name: str, blocks: Tensor) -> Tensor:
    if blocks.dim() < 2 or not blocks[0].is_contiguous():
        raise LayoutError(
            f"{picture(name, (blocks,))}: opaque blocks must be (blocks, ...), each block contiguous; "
            "where K and V of a block lie apart, register them as a pair"
        )
    size = blocks[0].numel()
    return blocks.as_strided((blocks.shape[0], 1, 1, size), (blocks.stride(0), size, size, 1))


def _unasked(entry: Layout) -> str | None:
    """What `layout` is where an entry may be found: None, unless it must be named."""
    return entry.name if entry.k_transposed else None


def _transposed(t: Tensor, spec: KVSpec) -> list[Tensor]:
    blocks = t.reshape(*t.shape[:2], 2, -1)
    if blocks.data_ptr() != t.data_ptr() or t.device.type != "cpu":
        raise LayoutError(f"{picture('K transposed', (t,))}: needs contiguous blocks in the CPU's memory")
    k = blocks[:, :, 0].view(*t.shape[:2], spec.head_size, spec.block_size).permute(0, 3, 1, 2)
    v = blocks[:, :, 1].view(*t.shape[:2], spec.block_size, spec.head_size).permute(0, 2, 1, 3)
    return [k, v]


def _to_bnhd(t: Tensor, axes: str, block_size: int) -> Tensor:
    if "S" in axes:
        t, axes = t.view(-1, block_size, *t.shape[1:]), axes.replace("S", "BN")
    if "H" not in axes:
        t, axes = t.unsqueeze(-2), axes.replace("D", "HD")
    return t.permute(*(axes.index(axis) for axis in "BNHD"))


def _integers(tensors: Tensors) -> list[Tensor]:
    return [t.detach().view(WORDS[t.dtype.itemsize]) for t in tensors]
