"""Finds which tokens of a batch belong to one text, from the keywords of flash-linear-attention and transformers.

Both pack texts one after the other and keep them apart by keywords: cu_seqlens, cu_seq_lens_q and cu_seq_lens_k, seq_idx, or position_ids
that begin again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from efla.ops._check import check_axes, check_ends, mistake

_MODEL = "model"
ENDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class Packed(NamedTuple):
    """N texts with n tokens in all, which lie in a batch [B, T]."""

    indices: Tensor  # [n], of the tokens among the B · T
    cu_seqlens: Tensor  # [N + 1]
    position_ids: Tensor  # [1, n]


def find_texts(
    x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, keywords: Mapping[str, Tensor | None]
) -> Packed | None:
    """Returns the texts of x [B, T, D] if a row has more than one; None for one text per row.

    Args:
        attention_mask: [B, T], 0 for padding; None for no padding.
        position_ids: [B or 1, T]; a text begins where they rise neither by 1 nor by the distance in the row, which padding makes longer.
        keywords: cu_seqlens, cu_seq_lens_q and cu_seq_lens_k [N + 1], which need B = 1 and no padding, and seq_idx [B or 1, T], where
            a text begins at every change.
    """
    batch, tokens = x.shape[:2]
    cu_seqlens = _given_ends(x, attention_mask, keywords)
    if cu_seqlens is None and (tokens < 2 or position_ids is None and keywords.get("seq_idx") is None):
        return None
    indices = torch.arange(batch * tokens, device=x.device)
    if attention_mask is not None:
        indices = attention_mask.flatten().nonzero().flatten()
    if cu_seqlens is None:
        rows = (indices // tokens).diff().ne(0)
        begins = rows
        if position_ids is not None:
            rise = _of_tokens("position_ids", position_ids, x)[indices].diff()
            begins = begins | rise.ne(1) & rise.ne(indices.diff())
        if (seq_idx := keywords.get("seq_idx")) is not None:
            begins = begins | _of_tokens("seq_idx", seq_idx, x)[indices].diff().ne(0)
        if torch.equal(begins, rows):
            return None
        cu_seqlens = torch.cat([indices.new_zeros(1), begins.nonzero().flatten() + 1, indices.new_tensor([len(indices)])])
    if position_ids is not None:
        positions = _of_tokens("position_ids", position_ids, x)[indices]
    else:
        positions = torch.arange(len(indices), device=x.device) - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return Packed(indices, cu_seqlens, positions.unsqueeze(0))


def _of_tokens(name: str, numbers: Tensor, x: Tensor) -> Tensor:
    """Returns numbers [B or 1, T] as [B · T]."""
    got, expected = check_axes(_MODEL, name, numbers, "B T"), list(x.shape[:2])
    if got["T"] != expected[1] or got["B"] not in (1, expected[0]):
        raise mistake(_MODEL, name, f"shape {list(numbers.shape)}", f"[B, T] = {expected}")
    return numbers.expand(expected).flatten()


def _given_ends(x: Tensor, attention_mask: Tensor | None, keywords: Mapping[str, Tensor | None]) -> Tensor | None:
    """Returns the cu_seqlens that the keywords contain. Raises ValueError if two keywords differ; None without such a keyword."""
    found: Tensor | None = None
    for name in ENDS:
        ends = keywords.get(name)
        if ends is None:
            continue
        check_ends(_MODEL, name, ends, x.shape[1])
        if x.shape[0] != 1:
            raise mistake(_MODEL, name, f"a batch of {x.shape[0]}", "texts packed into a batch of 1")
        if attention_mask is not None:
            raise mistake(_MODEL, name, "padding in attention_mask too", "no padding beside packed texts")
        if found is not None and found.tolist() != ends.tolist():
            raise mistake(_MODEL, name, ends.tolist(), f"the other keyword's {found.tolist()}")
        found = ends.to(x.device)
    return found
