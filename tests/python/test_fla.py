"""flash-linear-attention's functions computed by this package, against its naive ones; skipped where it is not installed."""

import contextlib
import importlib
import importlib.util
import os
import unittest
import warnings
from unittest import mock

import torch
from support import assert_close, inputs, state

import efla


@unittest.skipUnless(importlib.util.find_spec("fla"), "flash-linear-attention is not installed")
class Backend(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU
            importlib.import_module("efla.fla")

    def counted(self, function, *arguments, **named):
        """The results, and how often the operator ran."""
        with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=torch.ops.efla.delta_rule) as operator:
            return function(*arguments, **named), operator.call_count

    def test_every_function(self):
        import fla.ops
        from fla.ops.delta_rule.naive import delta_rule_recurrence
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
        from fla.ops.kda.naive import naive_recurrent_kda

        for name, decay, naive in (
            ("chunk_delta_rule", None, None),
            ("fused_recurrent_delta_rule", None, None),
            ("chunk_gated_delta_rule", "scalar", naive_recurrent_gated_delta_rule),
            ("fused_recurrent_gated_delta_rule", "scalar", naive_recurrent_gated_delta_rule),
            ("chunk_kda", "channel", naive_recurrent_kda),
            ("fused_recurrent_kda", "channel", naive_recurrent_kda),
        ):
            x = {**inputs(tokens=40, decay=decay), "initial_state": state()}
            if naive is None:
                transposed = [x[letter].transpose(1, 2) for letter in ("q", "k", "v", "beta")]
                o, final = delta_rule_recurrence(*transposed, x["initial_state"])
                expected = o.transpose(1, 2), final
            else:
                expected = naive(**x, output_final_state=True)
            (got, calls) = self.counted(getattr(fla.ops, name), **x, output_final_state=True)
            self.assertEqual(calls, 1, name)
            for a, b in zip(got, expected):
                assert_close(self, a, b, what=name)

    def test_gradients_and_positions(self):
        from fla.ops.kda import chunk_kda

        x = {name: tensor.requires_grad_() for name, tensor in inputs(tokens=40, decay="channel").items()}
        (o, _), calls = self.counted(chunk_kda, x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, False, True)
        self.assertEqual(calls, 1)
        expected = efla.chunk_kda(**x, use_qk_l2norm_in_kernel=True)[0]
        self.assertTrue(torch.equal(o, expected))
        o.sum().backward()
        self.assertTrue(all(torch.isfinite(tensor.grad).all() for tensor in x.values()))

    def test_layers_of_fla_use_it(self):
        import fla.layers.delta_net
        import fla.ops.delta_rule

        self.assertIs(fla.layers.delta_net.chunk_delta_rule, fla.ops.delta_rule.chunk_delta_rule)
        self.assertEqual(fla.layers.delta_net.chunk_delta_rule.__module__, "fla.ops.delta_rule.chunk")

    def test_shapes_names_and_dtypes_of_fla(self):
        from fla.ops.kda import chunk_kda

        x = inputs(decay="channel", dtype=torch.bfloat16)
        gate = {"use_gate_in_kernel": True, "A_log": torch.rand(1, 1, 2, 1), "dt_bias": torch.rand(24)}
        with torch.inference_mode(), self.assertWarnsRegex(DeprecationWarning, "renamed to `state_v_first`"):
            o, final, states = chunk_kda(
                **x, **gate, output_final_state=True, return_intermediate_states=True, transpose_state_layout=True
            )
        with torch.inference_mode():
            expected = efla.chunk_kda(**x, **{**gate, "A_log": gate["A_log"].flatten()}, output_final_state=True)
        self.assertTrue(torch.equal(o, expected[0]))
        self.assertTrue(torch.equal(final.transpose(-1, -2), expected[1]))
        self.assertEqual((states.dtype, states.shape), (torch.bfloat16, (2, 2, 2, 10, 12)))

    def test_what_is_declined(self):
        from efla.fla import declines, disable, enable

        x = inputs(tokens=5, decay="channel")
        self.assertEqual(declines("chunk_kda", **x, chunk_size=16), "chunk_size is 16, expected one of 32, 64")
        self.assertIsNone(declines("chunk_delta_rule", x["q"], x["k"], x["v"], x["beta"], chunk_size=16))
        ints = {name: tensor.int() for name, tensor in x.items()}
        self.assertIsNone(declines("chunk_kda", **x, safe_gate=False, cu_seqlens_cpu=torch.tensor([0, 5])))
        for named, reason in (
            (ints, "q has dtype torch.int32, expected torch.float32, torch.bfloat16 or torch.float16"),
            ({**x, "v": x["v"].half()}, "v has dtype torch.float16, expected torch.float32, as q"),
            ({**x, "cp_context": object()}, "cp_context is not implemented"),
            ({**x, "use_graph": True}, "use_graph is not implemented"),
            ({**x, "something_new": 3}, "something_new is not implemented"),
            ({name: tensor.to("meta") for name, tensor in x.items()}, "q is on meta, expected a CPU or an NVIDIA GPU"),
        ):
            self.assertEqual(declines("chunk_kda", **named), reason)
        with mock.patch.dict(os.environ, FLA_EFLA="0"):
            self.assertEqual(declines("chunk_kda", **x), "FLA_EFLA is 0")
        disable()
        try:
            self.assertEqual(declines("chunk_kda", **x), "efla.fla is disabled")
            from fla.ops.delta_rule import chunk_delta_rule

            with mock.patch.object(torch.ops.efla, "delta_rule") as operator, contextlib.suppress(Exception):
                chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"])  # fails without a GPU
            self.assertEqual(operator.call_count, 0)
        finally:
            enable()
        self.assertIsNone(declines("chunk_kda", **x))

    def test_what_is_declined_on_a_gpu(self):
        from efla.fla import declines
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
            named = {"q": q, "k": q, "v": q, "g": q, "beta": q[..., 0]}
            for function, algorithm in (("chunk_kda", "chunk"), ("fused_recurrent_kda", "auto")):
                for choice, reason in ((("a_kernel", "another: slow"), None), (("", "no kernel"), "no kernel")):
                    with mock.patch.object(torch.ops.efla, "delta_rule_choice", return_value=choice) as asked:
                        self.assertEqual(declines(function, **named), reason)
                    self.assertEqual(asked.call_args.args[-1], algorithm)
            q = torch.empty(1, 8, 2, 128, dtype=torch.float16, device="cuda")
            got = declines("chunk_delta_rule", q, q, q, q[..., 0])
            self.assertEqual(got, "efla computes torch.float16 in float32, which takes longer for keys of 128 dimensions")


if __name__ == "__main__":
    unittest.main()
