"""The operator as a function that torch.func can differentiate, which the operator's own gradients, made in C++, refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BACKWARD_INTERVAL = 32  # tokens between the states that the backward starts from


class DeltaRule(torch.autograd.Function):
    """apply(*arguments of efla::delta_rule without output_final_state) returns (o, final_state, states between)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:  # type: ignore[override, unused-ignore]
        return torch.ops.efla.delta_rule_with_states(*arguments[:-1], _BACKWARD_INTERVAL, arguments[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, ctx.scale, ctx.step, ctx.erase_scale, ctx.write_scale, ctx.qk_l2norm, ctx.implementation, erase_key = inputs
        ctx.save_for_backward(*tensors, erase_key, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dfinal_state: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *inputs, erase_key, states = ctx.saved_tensors
        gradients = torch.ops.efla.delta_rule_bwd(
            *inputs,
            states,
            inputs[0].new_zeros(*inputs[0].shape[:2], *inputs[2].shape[2:]) if do is None else do,
            dfinal_state,
            ctx.scale,
            *torch.ops.efla.delta_rule_step_size(ctx.step),
            ctx.erase_scale,
            ctx.write_scale,
            ctx.qk_l2norm,
            ctx.implementation,
            _BACKWARD_INTERVAL,
            erase_key,
        )
        *gradients, derase_key = gradients
        of_inputs = (None if tensor is None else gradient for tensor, gradient in zip(inputs, gradients))
        return (*of_inputs, *[None] * 7, None if erase_key is None else derase_key)  # None: cu_seqlens and six settings
