"""Lossless pages in plain torch: for every device, and the reference for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from lwkv.codecs.lossless_form import ESCAPE, FARTHEST, GROUP, ZERO, LosslessForm
from lwkv.codecs.torch_pages import TorchPages


class TorchLossless(TorchPages[LosslessForm]):
    """A `Coder` for any device."""

    def _encode(self, raw: Tensor, coded: Tensor) -> None:
        form, pages = self._form, len(raw)
        bits = raw.new_zeros((pages, form.groups * GROUP, form.width), dtype=torch.int32)
        bits[:, : form.rows] = raw.view(torch.int16).view(pages, form.rows, form.width)
        exponents = (bits >> 7) & 0xFF
        tops = exponents.amax(2, keepdim=True)
        below = tops - exponents
        codes = torch.where(below <= FARTHEST, below, ESCAPE).masked_fill_(exponents == 0, ZERO)
        coded[:, form.tops_at : form.codes_at] = tops.view(pages, -1)
        coded[:, form.codes_at : form.signs_at] = (codes[..., ::2] | codes[..., 1::2] << 4).view(pages, -1)
        coded[:, form.signs_at : form.escapes_at] = ((bits >> 8) & 0x80 | bits & 0x7F).view(pages, -1)
        self._add_escapes(coded, codes == ESCAPE, exponents)

    def _add_escapes(self, coded: Tensor, escaped: Tensor, exponents: Tensor) -> None:
        """Write header, starts and escapes; [pages, rows, width] each."""
        form, pages = self._form, len(coded)
        before = coded.new_zeros((pages, form.num_starts), dtype=torch.int32)
        counts = escaped.view(pages, form.groups, -1).sum(2, dtype=torch.int32)
        torch.cumsum(counts, 1, dtype=torch.int32, out=before[:, 1 : form.groups + 1])
        before[:, form.groups :] = before[:, form.groups : form.groups + 1]
        header = torch.tensor(form.header(0), dtype=torch.int32, device=coded.device).repeat(pages, 1)
        header[:, 5] = before[:, form.groups]
        coded[:, : form.tops_at] = torch.cat([header, before], 1).view(torch.uint8)
        # What is no escape, or has no room, goes to a place more than there is.
        place = torch.where(escaped.view(pages, -1), _ranks(escaped), form.capacity).clamp_(max=form.capacity)
        room = coded.new_zeros((pages, form.capacity + 1))
        room.scatter_(1, place, exponents.view(pages, -1).to(torch.uint8))
        coded[:, form.escapes_at :] = room[:, :-1]

    def _decode(self, coded: Tensor, raw: Tensor) -> None:
        form, pages = self._form, len(coded)
        shape = pages, form.groups * GROUP, form.width
        pairs = coded[:, form.codes_at : form.signs_at].int()
        codes = torch.stack([pairs & 15, pairs >> 4], 2).view(shape)
        signs = coded[:, form.signs_at : form.escapes_at].int().view(shape)
        tops = coded[:, form.tops_at : form.codes_at].int()[..., None]
        exponents = ((tops - codes) & 0xFF).masked_fill_(codes == ZERO, 0)
        escaped = codes == ESCAPE
        place = _ranks(escaped).clamp_(0, form.capacity - 1)
        kept = coded[:, form.escapes_at :].gather(1, place).int().view(shape)
        exponents = torch.where(escaped, kept, exponents)
        bits = (signs & 0x80) << 8 | exponents << 7 | signs & 0x7F
        # By way of int32, whose upper half is cut off.
        raw.view(torch.int16).copy_(bits[:, : form.rows].reshape(pages, -1))


def _ranks(escaped: Tensor) -> Tensor:
    """For [pages, rows, width]: how many escapes of the page come before each element, int64."""
    escapes = escaped.view(len(escaped), -1)
    return escapes.cumsum(1).sub_(escapes.long())
