"""The token mixer: projections, short convolution, the delta rule, the norm of the output, and the output projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla._choices import Activation, GateActivation, Mode, Normalization, Step
from efla.layers.cache import States, keep_states, states_of
from efla.layers.parts import HeadNorm, ShortConvolution, last_columns, repad, unpad
from efla.ops._check import check_axes, check_ends, check_rest, check_shape, mistake
from efla.ops._gate import channel_gate, scalar_gate, widen
from efla.ops._run import delta_rule
from efla.ops.decode import delta_rule_step


@dataclass(frozen=True)
class Rule:
    """A mixer's recurrence: the arguments of chunk_efla, and where β and the decay come from."""

    step: Step
    erase_scale: float = 1.0
    write_scale: float = 1.0
    qk_norm: Optional[Normalization] = None  # l2, or sum (of absolute values), or None for q and k as they are
    beta: str = "sigmoid"  # of b_proj; or softplus; or one
    adaptive: bool = False  # β times softplus(alpha), alpha learned
    decay: Optional[str] = None  # scalar: one per head; channel: one per key channel
    lower_bound: Optional[float] = None  # of the logarithm of the decay per channel
    safe_gate: bool = False  # whether A_log starts at 0, as flash-linear-attention starts it for safe_gate
    steps: int = 1  # n, per token, each with keys, values and β of its own


def _rule_of(name: str) -> Rule:
    """Returns the rule of a mixer of the library. efla/rule/mixer_preset.cc says where each comes from."""
    step, erase_scale, write_scale, qk_l2norm, beta, adaptive, decay, lower_bound = torch.ops.efla.mixer_rule(name)
    return Rule(
        step,
        erase_scale,
        write_scale,
        "l2" if qk_l2norm else None,
        beta,
        adaptive,
        decay,
        lower_bound,
        safe_gate=lower_bound is not None,
    )


RULES: dict[str, Rule] = {name: _rule_of(name) for name in torch.ops.efla.mixer_names()}

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "elu": lambda x: F.elu(x) + 1, "identity": lambda x: x}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a mixer: D, H, HV, K, V."""

    hidden: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, Integral) or size < 1:
                raise ValueError(f"mixer: {name}: got {size!r}, expected a whole number of at least 1")
        if self.value_heads % self.heads != 0:
            raise ValueError(f"mixer: num_v_heads: got {self.value_heads}, expected a multiple of num_heads = {self.heads}")


class Mixer(nn.Module):
    """y = o_proj(norm(rule(act(conv(q_proj x)), act(conv(k_proj x)), silu(conv(v_proj x)), β, g))).

    Parameters have the names and shapes of flash-linear-attention's layers; the layers of this package differ in their
    constructors alone. `gate` of the output: None, "silu" (one projection) or "sigmoid" (two, of low rank); `gate_activation`
    replaces the function of the gate.
    """

    def __init__(
        self,
        sizes: Sizes,
        rule: Rule,
        *,
        mode: Mode = "chunk",
        gate: Literal["silu", "sigmoid"] | None = None,
        gate_activation: GateActivation | None = None,
        allow_neg_eigval: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        qk_activation: Activation = "silu",
        norm_eps: float = 1e-5,
        output_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("mode", mode, ("chunk", "fused_recurrent")),
            ("qk_activation", qk_activation, tuple(_ACTIVATIONS)),
            ("qk_norm", rule.qk_norm, ("l2", "sum", None)),
            ("beta", rule.beta, ("sigmoid", "softplus", "one")),
            ("decay", rule.decay, ("scalar", "channel", None)),
            ("gate", gate, ("silu", "sigmoid", None)),
            ("gate_activation", gate_activation, ("swish", "silu", "sigmoid", None)),
        ):
            if value not in allowed:
                raise ValueError(f"{type(self).__name__}: {name}: got {value!r}, expected one of {allowed}")
        if use_short_conv and (not isinstance(conv_size, Integral) or conv_size < 1):
            raise mistake(type(self).__name__, "conv_size", repr(conv_size), "a whole number of at least 1")
        self.sizes, self.rule, self.gate = sizes, rule, gate
        self.mode, self.layer_idx = mode, layer_idx
        self.allow_neg_eigval, self.qk_activation = allow_neg_eigval, qk_activation
        keys, values = sizes.heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        if not isinstance(rule.steps, int) or rule.steps < 1:
            raise mistake(type(self).__name__, "num_householder", repr(rule.steps), "a whole number of at least 1")

        self.q_proj = nn.Linear(sizes.hidden, keys, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, rule.steps * keys, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, rule.steps * values, bias=False)
        if rule.beta != "one":
            self.b_proj = nn.Linear(sizes.hidden, rule.steps * sizes.value_heads, bias=False)
        if rule.adaptive:
            self.alpha = nn.Parameter(torch.empty(sizes.value_heads))
        self._add_decay()
        self.use_short_conv = use_short_conv
        if use_short_conv:
            qk = "silu" if qk_activation == "silu" else None
            self.q_conv1d = ShortConvolution(keys, conv_size, conv_bias, qk)
            self.k_conv1d = ShortConvolution(rule.steps * keys, conv_size, conv_bias, qk)
            self.v_conv1d = ShortConvolution(rule.steps * values, conv_size, conv_bias)
        if gate == "silu":
            self.g_proj: nn.Module = nn.Linear(sizes.hidden, values, bias=False)
        elif gate == "sigmoid":
            self.g_proj = nn.Sequential(
                nn.Linear(sizes.hidden, sizes.value_dim, bias=False), nn.Linear(sizes.value_dim, values)
            )
        self.o_norm = HeadNorm(sizes.value_dim, norm_eps, gate_activation or gate, output_norm)
        self.o_proj = nn.Linear(values, sizes.hidden, bias=False)
        self.reset_parameters()

    def _add_decay(self) -> None:
        """Adds the projections and parameters of the decay."""
        if self.rule.decay is None:
            return
        sizes = self.sizes
        if self.rule.decay == "scalar":
            self.a_proj = nn.Linear(sizes.hidden, sizes.value_heads, bias=False)
            biases = sizes.value_heads
        else:
            biases = sizes.value_heads * sizes.key_dim
            self.f_proj = nn.Sequential(
                nn.Linear(sizes.hidden, sizes.value_dim, bias=False), nn.Linear(sizes.value_dim, biases, bias=False)
            )
        # float32 whatever torch.set_default_dtype says, because the decay is their exponential
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(biases, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """Draws what the layer's own parameters start with, as Mamba 2 and flash-linear-attention start them. Returns it by name."""
        values: dict[str, Tensor] = {}
        if self.rule.adaptive:
            values["alpha"] = torch.full_like(self.alpha, math.log(math.expm1(1)))
        if self.rule.decay is not None:
            least = 0 if self.rule.decay == "scalar" else 1
            rate = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(least, 16)
            values["A_log"] = torch.zeros_like(rate) if self.rule.safe_gate else torch.log(rate)
            time = torch.exp(torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1)))
            values["dt_bias"] = time + torch.log(-torch.expm1(-time))  # softplus of it is time
        return values

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws alpha, A_log and dt_bias again. The projections, convolutions and the norm have their own reset_parameters."""
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)
        self._mark()

    def _mark(self) -> None:
        """Marks the parameters that optimisers should not decay, as flash-linear-attention does. A copied parameter has no mark."""
        if self.rule.decay is not None:
            for parameter in (self.A_log, self.dt_bias):
                setattr(parameter, "_no_weight_decay", True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call, unused-ignore]
        self._mark()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None, Any]:
        """hidden_states [B, T, D] → ([B, T, D], None, past_key_values).

        Args:
            attention_mask: [B, T] or longer, whose last T columns count; 0 for padding, whose outputs are 0; not looked at with
                cu_seqlens.
            past_key_values: a dict, at first empty or None, that holds under layer_idx what the tokens so far left behind:
                recurrent_state [N, HV, K, V] and conv_state, three [N, ·, conv_size] or None. Or flash-linear-attention's
                Cache or transformers' DynamicCache, which then hold the same. A layer without layer_idx takes none.
            use_cache: whether to write to past_key_values; without gradients a single token does so in place.
            output_attentions: taken for compatibility; there are none.
            cu_seqlens: [N + 1], sequences packed one after the other into B = 1.
            more: cu_seqlens_cpu, and beside cu_seqlens also position_ids, which flash-linear-attention's models pass on, are
                without effect. Any other keyword is refused unless it is None.
        """
        check_rest(type(self).__name__, more, ("cu_seqlens_cpu",) if cu_seqlens is None else ("cu_seqlens_cpu", "position_ids"))
        batch, tokens = self._check_input(hidden_states)
        indices = None
        if cu_seqlens is not None:
            check_ends(type(self).__name__, "cu_seqlens", cu_seqlens, tokens)
        elif attention_mask is not None:
            columns = last_columns(type(self).__name__, attention_mask, batch, tokens)
            if batch > 0:
                hidden_states, cu_seqlens, indices = unpad(hidden_states, columns)
        if self.layer_idx is None and (use_cache or past_key_values is not None):
            raise mistake(type(self).__name__, "layer_idx", None, "the index of the layer, which a cache needs")
        key = self.layer_idx or 0  # without a cache not looked at
        last = states_of(past_key_values, key)
        self._check_states(last, batch if cu_seqlens is None else len(cu_seqlens) - 1)

        q, k, v, conv_state = self._qkv(hidden_states, last["conv_state"], cu_seqlens)
        o, recurrent_state = self._mix(q, k, v, hidden_states, last["recurrent_state"], use_cache, cu_seqlens)
        if use_cache:
            states = {"recurrent_state": recurrent_state, "conv_state": conv_state}
            past_key_values = keep_states(past_key_values, key, tokens, states)

        gate = None if self.gate is None else self.g_proj(hidden_states).reshape(o.shape)
        y = self.o_proj(self.o_norm(o, gate).flatten(2))
        return (y if indices is None else repad(y, indices, batch, tokens)), None, past_key_values

    def _check_input(self, hidden_states: Tensor) -> tuple[int, int]:
        """Returns B and T of hidden_states. Raises ValueError unless it is [B, T, D]."""
        name, width = type(self).__name__, self.sizes.hidden
        sizes = check_axes(name, "hidden_states", hidden_states, "B T D")
        if sizes["D"] != width:
            raise mistake(name, "hidden_states", f"shape {list(hidden_states.shape)}", f"[B, T, hidden_size] with hidden_size = {width}")
        return sizes["B"], sizes["T"]

    def _check_states(self, states: States, sequences: int) -> None:
        """Raises ValueError for states in the cache that are not of this number of sequences and of this layer's sizes."""
        name, state, conv_state = type(self).__name__, states["recurrent_state"], states["conv_state"]
        sizes = {"N": sequences, "HV": self.sizes.value_heads, "K": self.sizes.key_dim, "V": self.sizes.value_dim}
        if state is not None:
            check_shape(name, "past_key_values: recurrent_state", state, "N HV K V", sizes)
        if conv_state is not None and self.use_short_conv:
            for conv, last in zip((self.q_conv1d, self.k_conv1d, self.v_conv1d), conv_state):
                channels, width = conv.out_channels, conv.kernel_size[0]
                check_shape(name, "past_key_values: conv_state", last, "N D W", {"N": sequences, "D": channels, "W": width})

    def _qkv(
        self, x: Tensor, conv_state: tuple[Tensor, ...] | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None]:
        """q [B, T, H, K], k [B, T·n, H, K], v [B, T·n, HV, V] after convolution and activation, and the state of the convolutions."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        next_state = None
        if self.use_short_conv:
            q_cache, k_cache, v_cache = conv_state or (None, None, None)
            q, q_cache = self.q_conv1d(q, q_cache, cu_seqlens)
            k, k_cache = self.k_conv1d(k, k_cache, cu_seqlens)
            v, v_cache = self.v_conv1d(v, v_cache, cu_seqlens)
            next_state = (q_cache, k_cache, v_cache)
        else:
            v = F.silu(v)
        if not self.use_short_conv or self.qk_activation != "silu":
            activation = _ACTIVATIONS[self.qk_activation]
            q, k = activation(q), activation(k)
        q, k = q.unflatten(2, (self.sizes.heads, -1)), self._by_steps(k, self.sizes.heads)
        if self.rule.qk_norm == "sum":
            q, k = F.normalize(q, p=1.0, dim=-1, eps=1e-6), F.normalize(k, p=1.0, dim=-1, eps=1e-6)
        return q, k, self._by_steps(v, self.sizes.value_heads), next_state

    def _by_steps(self, x: Tensor, heads: int) -> Tensor:
        """x [B, T, n · heads · dim] as [B, T·n, heads, dim]."""
        n = self.rule.steps
        rows: Tensor = x.unflatten(2, (heads, -1)) if n == 1 else x.unflatten(2, (n, heads, -1)).flatten(1, 2)
        return rows

    def _beta(self, x: Tensor) -> Tensor:
        """β [B, T·n, HV]."""
        if self.rule.beta == "one":
            beta = x.new_ones(x.shape[0], x.shape[1] * self.rule.steps, self.sizes.value_heads)
        else:
            b = widen(self.b_proj(x))
            if self.rule.steps > 1:
                b = b.unflatten(2, (self.rule.steps, -1)).flatten(1, 2)
            beta = torch.sigmoid(b) if self.rule.beta == "sigmoid" else F.softplus(b)
        if self.rule.adaptive:
            beta = beta * F.softplus(self.alpha)
        return 2 * beta if self.allow_neg_eigval else beta

    def _decay(self, x: Tensor) -> Tensor | None:
        """g [B, T, HV] or [B, T, HV, K], or None."""
        if self.rule.decay is None:
            return None
        if self.rule.decay == "scalar":
            return scalar_gate(self.a_proj(x), self.A_log, self.dt_bias)
        f = self.f_proj(x).unflatten(2, (self.sizes.value_heads, -1))
        return channel_gate(f, self.A_log, self.dt_bias, self.rule.lower_bound)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Tensor | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """o [B, T, HV, V] and, with use_cache, the final state."""
        beta, g, rule = self._beta(x), self._decay(x), self.rule
        choices: dict[str, Any] = {
            "use_qk_l2norm_in_kernel": rule.qk_norm == "l2",
            "step": rule.step,
            "erase_scale": rule.erase_scale,
            "write_scale": rule.write_scale,
        }
        if cu_seqlens is not None and rule.steps > 1:
            cu_seqlens = cu_seqlens * rule.steps
        one_token = q.shape[1] == 1 and rule.steps == 1 and q.shape[0] > 0 and cu_seqlens is None and not torch.is_grad_enabled()
        if one_token and use_cache and state is not None and not state.requires_grad:
            g = None if g is None else g[:, 0]
            return delta_rule_step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], state, g, **choices).unsqueeze(1), state
        return delta_rule(
            type(self).__name__,
            q,
            k,
            v,
            beta,
            g,
            scale=None,
            initial_state=state,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            implementation="recurrent" if self.mode == "fused_recurrent" else "auto",
            steps_per_token=rule.steps,
            **choices,
        )[:2]
