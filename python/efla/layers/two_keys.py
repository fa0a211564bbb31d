"""Layers of flash-linear-attention whose rule erases with another key than it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from efla._choices import Mode
from efla.layers.mixer import Mixer, Rule
from efla.layers.named import of_heads
from efla.ops._gate import widen
from efla.ops.comba import chunk_comba, fused_recurrent_comba
from efla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2


class Comba(Mixer):
    """Comba: S_t = e^g S_{t−1} + β k (v − S_{t−1}ᵀ p)ᵀ, read by q − D p, with p = σ(decay) k. Forward as Mixer."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: Mode = "chunk",
        use_short_conv: bool = True,
        use_output_gate: bool = True,
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        """Makes the layer with fla.layers.Comba's arguments. They are GatedDeltaNet's, and:

        Args:
            use_output_gate: whether the output has a gate.
            use_output_correction, correction_factor: whether q is corrected by D p, and what D starts with.
            use_inner_decay: whether p is σ(decay) k; otherwise k. The norms of k and p cancel it in the key that erases.
        """
        super().__init__(
            of_heads("Comba", hidden_size, head_dim, num_heads, num_v_heads, expand_v),
            Rule("euler", qk_norm="l2", decay="scalar"),
            mode=mode,
            gate="silu" if use_output_gate else None,
            gate_activation="sigmoid" if use_output_gate else None,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )
        self.correction_factor = correction_factor
        self.decay = nn.Parameter(torch.ones(num_heads)) if use_inner_decay else None
        self.D = nn.Parameter(torch.full((num_heads,), float(correction_factor))) if use_output_correction else None
        self._mark()

    def initial_values(self) -> dict[str, Tensor]:
        values = super().initial_values()
        decay, D = getattr(self, "decay", None), getattr(self, "D", None)  # none while the base class is made
        if decay is not None:
            values["decay"] = torch.ones_like(decay)
        if D is not None:
            values["D"] = torch.full_like(D, self.correction_factor)
        return values

    def _mark(self) -> None:
        super()._mark()
        if getattr(self, "D", None) is not None:
            setattr(self.D, "_no_weight_decay", True)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Tensor | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        p = k if self.decay is None else (k * torch.sigmoid(self.decay)[:, None]).to(k.dtype)
        if self.D is not None:
            q = (q - self.D[:, None] * p).to(q.dtype)
        function: Any = fused_recurrent_comba if self.mode == "fused_recurrent" else chunk_comba
        o, final_state = function(
            q=q,
            k=k,
            v=v,
            p=p,
            g=self._decay(x),
            beta=self._beta(x),
            initial_state=state,
            output_final_state=use_cache,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        return o, final_state


class GatedDeltaNet2(Mixer):
    """Gated DeltaNet-2: a decay per key channel, erases with b ∘ k, writes w ∘ v. Forward as Mixer."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: Mode = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        """Makes the layer with fla.layers.GatedDeltaNet2's arguments, which are KimiDeltaAttention's without its bound.

        Args:
            num_v_heads: None or num_heads; groups of value heads are not implemented.
            allow_neg_eigval: whether the gate b is doubled.
        """
        if num_v_heads not in (None, num_heads):
            raise ValueError(f"GatedDeltaNet2: num_v_heads: got {num_v_heads}, expected num_heads = {num_heads} or None")
        super().__init__(
            of_heads("GatedDeltaNet2", hidden_size, head_dim, num_heads, None, expand_v),
            Rule("euler", qk_norm="l2", beta="one", decay="channel"),
            mode=mode,
            gate="sigmoid",
            allow_neg_eigval=allow_neg_eigval,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )
        self.b_proj = nn.Linear(hidden_size, num_heads * self.sizes.key_dim, bias=False)
        self.w_proj = nn.Linear(hidden_size, num_heads * self.sizes.value_dim, bias=False)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Tensor | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        b, w = (torch.sigmoid(widen(projection(x))) for projection in (self.b_proj, self.w_proj))
        function: Any = fused_recurrent_gdn2 if self.mode == "fused_recurrent" else chunk_gdn2
        o, final_state = function(
            q=q,
            k=k,
            v=v,
            g=self._decay(x),
            b=(2 * b if self.allow_neg_eigval else b).view(k.shape),
            w=w.view(v.shape),
            initial_state=state,
            output_final_state=use_cache,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        return o, final_state
