"""torch.compile traces functions and layers as one graph, forward and backward; PyTorch 2 only."""

import unittest

import torch
from support import assert_close, inputs, state

import efla
from efla.layers import EFLA, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention


@unittest.skipUnless(hasattr(torch, "compile"), "torch.compile came with PyTorch 2")
class Compile(unittest.TestCase):
    def check(self, eager, arguments, dynamic):
        compiled = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for x in arguments:
            x = [tensor.requires_grad_() for tensor in x]
            got, expected = compiled(*x), eager(*x)
            assert_close(self, got, expected)
            for name, a, b in zip(
                "qkvbg", torch.autograd.grad(got.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
            ):
                assert_close(self, a, b, what=name)

    def test_functions(self):
        packed = torch.tensor([0, 5, 40])
        for function, decay in (
            (lambda q, k, v, b: efla.chunk_delta_rule(q, k, v, b, output_final_state=True), None),
            (lambda q, k, v, b, g: efla.chunk_gated_delta_rule(q, k, v, g, b, use_qk_l2norm_in_kernel=True), "scalar"),
            (lambda q, k, v, b, g: efla.chunk_kda(q, k, v, g, b, use_beta_sigmoid_in_kernel=True), "channel"),
            (lambda q, k, v, b, g: efla.chunk_efla(q, k, v, b, g, step="rk4"), "channel"),
        ):
            torch._dynamo.reset()
            self.check(lambda *x: function(*x)[0], [inputs(t, decay=decay).values() for t in (40, 70)], True)
        torch._dynamo.reset()
        self.check(
            lambda q, k, v, b: efla.chunk_delta_rule(q, k, v, b, cu_seqlens=packed)[0],
            [inputs(40, batch=1).values()],
            True,
        )

    def test_one_token(self):
        torch._dynamo.reset()
        compiled = torch.compile(efla.delta_rule_step, backend="aot_eager", fullgraph=True)
        x = {name: tensor[:, 0] for name, tensor in inputs(2, decay="scalar").items()}
        states = [state(), state()]
        for _ in range(2):
            got, expected = (f(**x, state=s, step="exact") for f, s in zip((compiled, efla.delta_rule_step), states))
            assert_close(self, got, expected)
        assert_close(self, *states)
        self.assertFalse(torch.equal(states[0], state()))

    def test_tokens_of_a_pool(self):
        torch._dynamo.reset()
        compiled = torch.compile(efla.delta_rule_steps, backend="aot_eager", fullgraph=True)
        x, slots = inputs(2, decay="scalar"), torch.tensor([2, 0])
        pools = [state(3), state(3)]
        kept = torch.tensor([2, 1])
        got, expected = (f(**x, states=s, slots=slots, step="exact", kept=kept) for f, s in zip((compiled, efla.delta_rule_steps), pools))
        assert_close(self, got, expected)
        assert_close(self, *pools)
        self.assertFalse(torch.equal(pools[0], state(3)))

    def test_layers(self):
        for layer in (
            EFLA(hidden_size=24, num_heads=2),
            GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, num_v_heads=4),
            GatedDeltaProduct(hidden_size=24, head_dim=8, num_heads=2, num_householder=3),
            KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2),
        ):
            torch._dynamo.reset()
            self.check(lambda x: layer(x)[0], [[torch.randn(2, t, 24)] for t in (11, 40)], None)


if __name__ == "__main__":
    unittest.main()
