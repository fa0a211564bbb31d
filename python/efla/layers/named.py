"""Mixer under the names and with the constructors of flash-linear-attention's layers."""

from __future__ import annotations

import math
from dataclasses import replace

from efla._choices import Activation, GateActivation, Mode, Normalization, RuleName
from efla.layers.mixer import RULES, Mixer, Rule, Sizes
from efla.ops._check import check_lower_bound


def whole(layer: str, argument: str, value: float) -> int:
    """`value` as a whole number, or ValueError."""
    if not math.isclose(value, round(value), rel_tol=1e-5):
        raise ValueError(f"{layer}: {argument}: got {value}, expected a whole number")
    return round(value)


def _of_width(layer: str, hidden_size: int, num_heads: int, expand_k: float, expand_v: float) -> Sizes:
    """The sizes of a mixer whose heads share hidden_size · expand."""
    if num_heads < 1:
        raise ValueError(f"{layer}: num_heads: got {num_heads}, expected at least 1")
    keys, values = int(hidden_size * expand_k), int(hidden_size * expand_v)
    key_dim = whole(layer, "hidden_size * expand_k / num_heads", keys / num_heads)
    value_dim = whole(layer, "hidden_size * expand_v / num_heads", values / num_heads)
    return Sizes(hidden_size, num_heads, num_heads, key_dim, value_dim)


def of_heads(
    layer: str, hidden_size: int, head_dim: int, num_heads: int, num_v_heads: int | None, expand_v: float
) -> Sizes:
    """The sizes of a mixer whose heads have a size of their own."""
    value_dim = whole(layer, "head_dim * expand_v", head_dim * expand_v)
    return Sizes(hidden_size, num_heads, num_heads if num_v_heads is None else num_v_heads, head_dim, value_dim)


class DeltaNet(Mixer):
    """DeltaNet: S_t = S_{t−1} + β k (v − S_{t−1}ᵀ k)ᵀ. Forward as Mixer."""

    def __init__(
        self,
        mode: Mode = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: Activation = "silu",
        qk_norm: Normalization = "l2",
        norm_eps: float = 1e-5,
    ) -> None:
        """Makes the layer with fla.layers.DeltaNet's arguments.

        Args:
            mode: "chunk" for training and prefill; "fused_recurrent", token by token.
            d_model: another name of hidden_size, which it replaces.
            hidden_size: D, the width of the input and output.
            expand_k, expand_v: the widths of keys and values divided by hidden_size; all heads together.
            num_heads: H, heads of keys and of values.
            use_beta: whether the step size β is learned; otherwise it is 1.
            use_gate: whether the output has a gate.
            use_short_conv, conv_size, conv_bias: a causal convolution of the projections over conv_size tokens, and its bias.
            layer_idx: the index of the layer in the model, which a cache needs.
            allow_neg_eigval: whether β is doubled.
            qk_activation, qk_norm: the function of queries and keys, and their normalisation.
            norm_eps: added to the mean square in the norm of the output.
        """
        super().__init__(
            _of_width("DeltaNet", hidden_size if d_model is None else d_model, num_heads, expand_k, expand_v),
            replace(RULES["deltanet"], qk_norm=qk_norm, beta="sigmoid" if use_beta else "one"),
            mode=mode,
            gate="silu" if use_gate else None,
            allow_neg_eigval=allow_neg_eigval,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            qk_activation=qk_activation,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )


class EFLA(Mixer):
    """Error-free linear attention: DeltaNet with the exact step, and q and k as they are. Forward as Mixer.

    `rule` names another row of RULES; one with a decay gets its projections and parameters.
    """

    def __init__(
        self,
        mode: Mode = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        qk_activation: Activation = "silu",
        norm_eps: float = 1e-5,
        rule: RuleName = "efla",
    ) -> None:
        """Makes the layer. The arguments are DeltaNet's, and:

        Args:
            rule: the row of RULES that the layer computes.
        """
        if rule not in RULES:
            raise ValueError(f"EFLA: rule: got {rule!r}, expected one of {', '.join(RULES)}")
        super().__init__(
            _of_width("EFLA", hidden_size, num_heads, expand_k, expand_v),
            RULES[rule],
            mode=mode,
            gate="silu" if use_gate else None,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            qk_activation=qk_activation,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )


class GatedDeltaNet(Mixer):
    """Gated DeltaNet: a decay per head before every step. Forward as Mixer."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: Mode = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: GateActivation = "swish",
    ) -> None:
        """Makes the layer with fla.layers.GatedDeltaNet's arguments.

        Args:
            hidden_size: D, the width of the input and output.
            expand_v: the size of a value head divided by head_dim.
            head_dim: the size of a key head.
            num_heads, num_v_heads: H heads of keys, and HV heads of values, a multiple of H; None for H.
            mode: "chunk" for training and prefill; "fused_recurrent", token by token.
            use_gate, output_gate_activation: whether the output has a gate, and its function.
            use_short_conv, conv_size, conv_bias: a causal convolution of the projections over conv_size tokens, and its bias.
            layer_idx: the index of the layer in the model, which a cache needs.
            allow_neg_eigval: whether the step size β is doubled.
            norm_eps: added to the mean square in the norm of the output.
        """
        super().__init__(
            of_heads("GatedDeltaNet", hidden_size, head_dim, num_heads, num_v_heads, expand_v),
            RULES["gdn"],
            mode=mode,
            gate="silu" if use_gate else None,
            gate_activation=output_gate_activation,
            allow_neg_eigval=allow_neg_eigval,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )


class GatedDeltaProduct(Mixer):
    """Gated DeltaProduct: num_householder steps of the delta rule per token, with a decay before the first. Forward as Mixer."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: Mode = "chunk",
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
    ) -> None:
        """Makes the layer with fla.layers.GatedDeltaProduct's arguments. They are GatedDeltaNet's, and:

        Args:
            use_output_gate: whether the output has a gate.
            use_forget_gate: whether there is a decay per head.
            num_householder: n, the steps per token, each with keys, values and a β of its own.
        """
        super().__init__(
            of_heads("GatedDeltaProduct", hidden_size, head_dim, num_heads, num_v_heads, expand_v),
            Rule("euler", qk_norm="l2", decay="scalar" if use_forget_gate else None, steps=num_householder),
            mode=mode,
            gate="silu" if use_output_gate else None,
            allow_neg_eigval=allow_neg_eigval,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )


class KimiDeltaAttention(Mixer):
    """Kimi Delta Attention: a decay per key channel. Forward as Mixer."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: Mode = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        """Makes the layer with fla.layers.KimiDeltaAttention's arguments. They are GatedDeltaNet's without its gate's, and:

        Args:
            lower_bound: of the logarithm of the decay; None for no bound.
            safe_gate: whether lower_bound has to be in [−5, 0) and A_log starts at 0.
        """
        check_lower_bound("KimiDeltaAttention", lower_bound, safe_gate)
        super().__init__(
            of_heads("KimiDeltaAttention", hidden_size, head_dim, num_heads, num_v_heads, expand_v),
            replace(RULES["kda"], lower_bound=lower_bound, safe_gate=safe_gate),
            mode=mode,
            gate="sigmoid",
            allow_neg_eigval=allow_neg_eigval,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            layer_idx=layer_idx,
        )
