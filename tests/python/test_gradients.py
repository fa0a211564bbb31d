"""Gradients of every function against autograd through the recurrence in float64."""

import unittest

import torch
from reference import comba, delta_product, delta_rule, rwkv7
from support import assert_close, inputs, state

import efla


class Gradients(unittest.TestCase):
    def check(self, function, reference, x, dtype=torch.float32, what=""):
        """Compares the gradients of all the tensors x of function(**x) and reference(**x), which return (o, state)."""
        x = {name: tensor.detach().clone().requires_grad_() for name, tensor in x.items()}
        wide = {name: tensor.detach().double().requires_grad_() for name, tensor in x.items()}
        generator = torch.Generator().manual_seed(7)
        got, expected = function(**x), reference(**wide)
        weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in expected]
        for outputs in (got, expected):
            sum((w * out.double()).sum() for w, out in zip(weights, outputs)).backward()
        for name, tensor in x.items():
            self.assertEqual(tensor.grad.dtype, tensor.dtype)
            assert_close(self, tensor.grad, wide[name].grad, dtype, factor=4, what=f"{what} d{name}")

    def test_functions(self):
        for function, decay in (
            (efla.chunk_delta_rule, None),
            (efla.fused_recurrent_delta_rule, None),
            (efla.chunk_gated_delta_rule, "scalar"),
            (efla.fused_recurrent_gated_delta_rule, "scalar"),
            (efla.chunk_kda, "channel"),
            (efla.fused_recurrent_kda, "channel"),
        ):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                grouped = 4 if decay else 2
                x = inputs(tokens=45, decay=decay, value_heads=grouped, dtype=dtype)
                x["initial_state"] = state(value_heads=grouped)
                self.check(
                    lambda **x: function(**x, output_final_state=True, use_qk_l2norm_in_kernel=True),
                    lambda **x: delta_rule(**x, l2norm=True),
                    x,
                    dtype,
                    f"{function.__name__} {dtype}",
                )

    def test_steps(self):
        for step in ("exact", "rk4", "trapezoid"):
            for decay in (None, "channel"):
                x = {**inputs(tokens=40, decay=decay), "initial_state": state()}
                for function in (efla.chunk_efla, efla.fused_recurrent_efla):
                    self.check(
                        lambda **x: function(**x, output_final_state=True, step=step),
                        lambda **x: delta_rule(**x, step=step),
                        x,
                        what=f"{function.__name__} {step} {decay}",
                    )

    def test_two_keys(self):
        packed = torch.tensor([0, 5, 5, 40, 70])
        generator = torch.Generator().manual_seed(3)
        for step, decay, l2norm, group in (("euler", "channel", True, 2), ("exact", None, False, 1), ("trapezoid", "scalar", False, 2)):
            x = {**inputs(batch=1, decay=decay, value_heads=2 * group), "initial_state": state(4, value_heads=2 * group)}
            x["erase_key"] = x["k"] * torch.rand(x["k"].shape, generator=generator)
            for function in (efla.chunk_efla, efla.fused_recurrent_efla):
                self.check(
                    lambda **x: function(
                        **x, output_final_state=True, step=step, use_qk_l2norm_in_kernel=l2norm, cu_seqlens=packed
                    ),
                    lambda **x: delta_rule(**x, step=step, l2norm=l2norm, cu_seqlens=packed),
                    x,
                    what=f"{function.__name__} {step} {decay}",
                )

    def test_gdn2(self):
        generator = torch.Generator().manual_seed(4)
        for step, l2norm in (("euler", True), ("exact", False)):
            x = {**inputs(tokens=45, decay="channel", value_heads=4), "initial_state": state(value_heads=4)}
            del x["beta"]
            x["b"] = torch.rand(x["k"].shape, generator=generator)
            x["w"] = torch.rand(x["v"].shape, generator=generator)

            def reference(k, v, b, w, **x):
                ones = torch.ones(v.shape[:3], dtype=torch.float64)
                return delta_rule(k=k, v=w * v, beta=ones, erase_key=b * k, step=step, l2norm=l2norm, **x)

            for function in (efla.chunk_gdn2, efla.fused_recurrent_gdn2):
                self.check(
                    lambda **x: function(**x, output_final_state=True, use_qk_l2norm_in_kernel=l2norm, step=step),
                    reference,
                    x,
                    what=f"{function.__name__} {step}",
                )

    def test_gated_delta_product(self):
        for n, decay in ((1, "scalar"), (2, None), (3, "scalar")):
            x = {**inputs(tokens=20 * n, decay=decay), "initial_state": state()}
            for name in ("q", "g"):
                if name in x:
                    x[name] = x[name][:, :20]
            self.check(
                lambda **x: efla.chunk_gated_delta_product(
                    **{"g": None, **x}, num_householder=n, output_final_state=True, use_qk_l2norm_in_kernel=True
                ),
                lambda **x: delta_product(**x, n=n, l2norm=True),
                x,
                what=f"{n} steps",
            )

    def test_rwkv7(self):
        generator = torch.Generator().manual_seed(5)
        x = inputs(tokens=40, decay="channel")
        removal = torch.nn.functional.normalize(x.pop("q"), dim=-1)
        x = {"r": x["k"].flip(1), "w": -0.61 * torch.sigmoid(x["g"]), "k": x["k"], "v": x["v"]}
        x |= {"a": -removal, "b": removal * torch.rand(removal.shape, generator=generator), "initial_state": state()}
        self.check(lambda **x: efla.chunk_rwkv7(**x, output_final_state=True), rwkv7, x, what="chunk_rwkv7")
        self.check(lambda **x: efla.fused_recurrent_rwkv7(**x, scale=1.0), rwkv7, x, what="fused_recurrent_rwkv7")

    def test_comba(self):
        for step, l2norm, group in (("euler", True, 2), ("euler", False, 1), ("exact", False, 1)):
            x = {**inputs(tokens=45, decay="scalar", value_heads=2 * group), "initial_state": state(value_heads=2 * group)}
            x["p"] = 0.7 * x["k"] + 0.05

            def reference(p, g, **x):
                if step == "euler":
                    return comba(p=p, g=g, l2norm=l2norm, **x)
                return delta_rule(g=g, erase_key=p * torch.exp(-g)[..., None], step=step, **x)

            for function in (efla.chunk_comba, efla.fused_recurrent_comba):
                self.check(
                    lambda **x: function(**x, output_final_state=True, use_qk_l2norm_in_kernel=l2norm, step=step),
                    reference,
                    x,
                    what=f"{function.__name__} {step} {l2norm}",
                )

    def test_packed_sequences(self):
        packed = torch.tensor([0, 5, 5, 40, 70])
        x = {**inputs(batch=1, decay="channel"), "initial_state": state(sequences=4)}
        self.check(
            lambda **x: efla.chunk_kda(**x, output_final_state=True, cu_seqlens=packed),
            lambda **x: delta_rule(**x, cu_seqlens=packed),
            x,
        )

    def test_gates_and_states_with_values_first(self):
        x = {**inputs(tokens=40, decay="channel"), "initial_state": state().transpose(-1, -2).contiguous()}
        x.update(A_log=torch.tensor([0.3, -1.0]), dt_bias=torch.linspace(-2, 1, 24))

        def reference(g, A_log, dt_bias, beta, initial_state, **x):
            g = -5 * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias.view(2, 12)))
            o, final = delta_rule(**x, g=g, beta=2 * beta.sigmoid(), initial_state=initial_state.transpose(-1, -2))
            return o, final.transpose(-1, -2)

        self.check(
            lambda **x: efla.chunk_kda(
                **x,
                output_final_state=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=True,
                safe_gate=True,
                lower_bound=-5.0,
                state_v_first=True,
            ),
            reference,
            x,
        )

    def test_of_one_output_and_one_input_only(self):
        x = inputs(decay="scalar")
        x["g"].requires_grad_()
        wide = x["g"].detach().double().requires_grad_()
        efla.chunk_gated_delta_rule(**x)[0].sum().backward()
        delta_rule(**{**x, "g": wide})[0].sum().backward()
        assert_close(self, x["g"].grad, wide.grad, factor=4)

    def test_the_backward_keeps_the_inputs_and_one_state_a_chunk(self):
        for decay in (None, "scalar", "channel"):
            x = inputs(tokens=100, batch=1, key_dim=32, value_dim=48, decay=decay)
            x = {name: tensor.requires_grad_() for name, tensor in x.items()}
            kept = {}

            def keep(tensor):
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                o, _ = efla.chunk_efla(**x)
            states = 4 * 2 * 32 * 48 * 4  # chunks, heads, K, V, bytes
            taken = sum(tensor.numel() * tensor.element_size() for tensor in (*x.values(), o))
            self.assertGreaterEqual(sum(kept.values()), states, decay)
            self.assertLessEqual(sum(kept.values()), taken + states, decay)

    def test_finite_differences_in_float64(self):
        x = inputs(tokens=5, key_dim=3, value_dim=2, decay="channel", dtype=torch.float64)
        x["g"] = x["g"].double()
        arguments = [tensor.requires_grad_() for tensor in x.values()]
        torch.autograd.gradcheck(
            lambda q, k, v, beta, g: efla.chunk_efla(q, k, v, beta, g, output_final_state=True), arguments
        )


if __name__ == "__main__":
    unittest.main()
