"""The layers: parameters as flash-linear-attention names them, and decoding, packing and padding alike to one forward."""

import contextlib
import copy
import math
import pickle
import unittest

import torch
from support import assert_close

import efla
from efla.layers import (
    EFLA,
    RULES,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    Mixer,
    Rule,
    Sizes,
)

CONV = {f"{x}_conv1d.weight": [size, 1, 4] for x, size in (("q", 32), ("k", 32))}
QK = {f"{x}_proj.weight": [32, 24] for x in "qk"}

# Width 24; keys of 2 heads of 16 dims, or DeltaNet's share of the width.
PARAMETERS = [
    (
        DeltaNet(hidden_size=24, num_heads=3, expand_v=2, use_gate=True),
        {
            "q_proj.weight": [24, 24],
            "k_proj.weight": [24, 24],
            "v_proj.weight": [48, 24],
            "b_proj.weight": [3, 24],
            "q_conv1d.weight": [24, 1, 4],
            "k_conv1d.weight": [24, 1, 4],
            "v_conv1d.weight": [48, 1, 4],
            "g_proj.weight": [48, 24],
            "o_norm.weight": [16],
            "o_proj.weight": [24, 48],
        },
    ),
    (
        GatedDeltaNet(hidden_size=24, head_dim=16, num_heads=2, num_v_heads=4),
        {
            **QK,
            **CONV,
            "v_proj.weight": [128, 24],
            "v_conv1d.weight": [128, 1, 4],
            "b_proj.weight": [4, 24],
            "a_proj.weight": [4, 24],
            "A_log": [4],
            "dt_bias": [4],
            "g_proj.weight": [128, 24],
            "o_norm.weight": [32],
            "o_proj.weight": [24, 128],
        },
    ),
    (
        GatedDeltaProduct(hidden_size=24, head_dim=16, num_heads=2, num_v_heads=4, num_householder=3, use_output_gate=False),
        {
            "q_proj.weight": [32, 24],
            "k_proj.weight": [96, 24],
            "v_proj.weight": [384, 24],
            "b_proj.weight": [12, 24],
            "q_conv1d.weight": [32, 1, 4],
            "k_conv1d.weight": [96, 1, 4],
            "v_conv1d.weight": [384, 1, 4],
            "a_proj.weight": [4, 24],
            "A_log": [4],
            "dt_bias": [4],
            "o_norm.weight": [32],
            "o_proj.weight": [24, 128],
        },
    ),
    (
        KimiDeltaAttention(hidden_size=24, head_dim=16, num_heads=2, num_v_heads=4, expand_v=0.5),
        {
            **QK,
            **CONV,
            "v_proj.weight": [32, 24],
            "v_conv1d.weight": [32, 1, 4],
            "b_proj.weight": [4, 24],
            "A_log": [4],
            "dt_bias": [64],
            "f_proj.0.weight": [8, 24],
            "f_proj.1.weight": [64, 8],
            "g_proj.0.weight": [8, 24],
            "g_proj.1.weight": [32, 8],
            "g_proj.1.bias": [32],
            "o_norm.weight": [8],
            "o_proj.weight": [24, 32],
        },
    ),
]


ARGUMENTS = {
    "DeltaNet": {"hidden_size": 24, "num_heads": 2, "use_gate": True},
    "GatedDeltaNet": {"hidden_size": 24, "head_dim": 8, "num_heads": 2, "num_v_heads": 4},
    "GatedDeltaProduct": {"hidden_size": 24, "head_dim": 8, "num_heads": 2, "num_v_heads": 4},
    "Comba": {"hidden_size": 24, "head_dim": 8, "num_heads": 4},
    "GatedDeltaNet2": {"hidden_size": 24, "head_dim": 8, "num_heads": 4},
    "KimiDeltaAttention": {"hidden_size": 24, "head_dim": 8, "num_heads": 2},
    "EFLA": {"hidden_size": 24, "num_heads": 2, "rule": "efla-adaptive"},
}


def layers():
    torch.manual_seed(0)
    return [
        DeltaNet(hidden_size=24, num_heads=2, use_gate=True, allow_neg_eigval=True, layer_idx=0),
        DeltaNet(hidden_size=24, num_heads=2, qk_activation="elu", qk_norm="sum", conv_bias=True, use_beta=False, layer_idx=0),
        GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, num_v_heads=4, layer_idx=3),
        GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, use_gate=False, mode="fused_recurrent", layer_idx=1),
        KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2, layer_idx=0),
        KimiDeltaAttention(
            hidden_size=24, head_dim=8, num_heads=2, safe_gate=True, lower_bound=-5.0, use_short_conv=False, layer_idx=0
        ),
        EFLA(hidden_size=24, num_heads=2, layer_idx=0),
        GatedDeltaProduct(hidden_size=24, head_dim=8, num_heads=2, num_v_heads=4, num_householder=3, layer_idx=2),
        GatedDeltaProduct(
            hidden_size=24, head_dim=8, num_heads=2, use_forget_gate=False, allow_neg_eigval=False, use_short_conv=False, layer_idx=2
        ),
        Comba(hidden_size=24, head_dim=8, num_heads=2, correction_factor=0.5, layer_idx=0),
        Comba(
            hidden_size=24,
            head_dim=8,
            num_heads=2,
            num_v_heads=4,
            mode="fused_recurrent",
            use_output_gate=False,
            use_inner_decay=False,
            layer_idx=0,
        ),
        GatedDeltaNet2(hidden_size=24, head_dim=8, num_heads=2, allow_neg_eigval=True, layer_idx=1),
        GatedDeltaNet2(hidden_size=24, head_dim=8, num_heads=2, mode="fused_recurrent", use_short_conv=False, layer_idx=1),
    ]


class Layers(unittest.TestCase):
    def setUp(self):
        self.x = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(5))

    def test_parameters(self):
        for layer, expected in PARAMETERS:
            got = {name: list(parameter.shape) for name, parameter in layer.named_parameters()}
            self.assertEqual(got, expected, type(layer).__name__)

    def test_decoding_token_by_token_is_one_forward(self):
        for layer in layers():
            whole = layer(self.x)[0]
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    y, nothing, cache = layer(self.x[:, :6], use_cache=True)
                    parts = [y]
                    for t in range(6, 11):
                        y, nothing, cache = layer(self.x[:, t : t + 1], past_key_values=cache, use_cache=True)
                        parts.append(y)
                self.assertIsNone(nothing)
                self.assertEqual(list(cache), [layer.layer_idx])
                assert_close(self, torch.cat(parts, 1), whole, what=type(layer).__name__)

    def test_packed_and_padded_sequences_are_separate_ones(self):
        lengths = (11, 4)
        packed = torch.cat([self.x[n, :length] for n, length in enumerate(lengths)]).unsqueeze(0)
        mask = torch.tensor([[1] * 11, [1] * 4 + [0] * 7])
        for layer in layers():
            with torch.no_grad():
                separate = [layer(self.x[n : n + 1, :length])[0] for n, length in enumerate(lengths)]
                y, _, cache = layer(packed, cu_seqlens=torch.tensor([0, 11, 15]), use_cache=True)
                assert_close(self, y, torch.cat(separate, 1), what="packed")
                padded = layer(self.x, attention_mask=mask)[0]
                assert_close(self, padded[1, :4], separate[1][0], what="padded")
                self.assertEqual(float(padded[1, 4:].abs().max()), 0)
                after = layer(self.x[:, :1], past_key_values=cache, use_cache=True)[0]
                longer = layer(torch.cat([self.x[1:2, :4], self.x[1:2, :1]], 1))[0]
                assert_close(self, after[1:2], longer[:, -1:], what="after packing")

    def test_a_mask_covers_the_tokens_in_the_cache(self):
        mask = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
        layer = GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, layer_idx=0)
        with torch.no_grad():
            whole, cache = layer(self.x, mask)[0], {}
            ends = (0, 6, 6, 7, 11)  # once no token
            parts = [layer(self.x[:, a:b], mask[:, :b], cache, use_cache=True)[0] for a, b in zip(ends, ends[1:])]
        assert_close(self, torch.cat(parts, 1), whole)

    def test_a_mask_of_another_shape_is_refused(self):
        layer = GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2)
        expected = "expected [B, at least T] = [2, at least 11]"
        for mask, message in (
            (torch.ones(2, 10), f"shape [2, 10], {expected}"),
            (torch.ones(1, 11), f"shape [1, 11], {expected}"),
            (torch.ones(3, 11), f"shape [3, 11], {expected}"),
            (torch.ones(2, 11, 1), "shape [2, 11, 1], expected a tensor [B, T]"),
            ([[1] * 11] * 2, "list, expected a tensor [B, T]"),
        ):
            with self.assertRaises(ValueError) as caught:
                layer(self.x, attention_mask=mask)
            self.assertEqual(str(caught.exception), f"GatedDeltaNet: attention_mask: got {message}")

    def test_an_input_of_another_shape_is_refused(self):
        for layer in layers():
            for x, message in (
                (self.x[0], "shape [11, 24], expected a tensor [B, T, D]"),
                (None, "NoneType, expected a tensor [B, T, D]"),
                (torch.zeros(2, 11, 25), "shape [2, 11, 25], expected [B, T, hidden_size] with hidden_size = 24"),
            ):
                with self.assertRaises(ValueError) as caught:
                    layer(x)
                self.assertEqual(str(caught.exception), f"{type(layer).__name__}: hidden_states: got {message}")

    def test_a_cache_of_another_batch_is_refused(self):
        packed, ends = self.x.flatten(0, 1).unsqueeze(0), torch.tensor([0, 3, 9, 22])
        mask = torch.ones(1, 11)
        for layer in layers():
            state = [2, layer.sizes.value_heads, layer.sizes.key_dim, layer.sizes.value_dim]
            for x, sequences, more in (
                (self.x[:1], 1, {}),
                (self.x[:1, :1], 1, {}),
                (self.x[:1], 1, {"attention_mask": mask}),
                (packed, 3, {"cu_seqlens": ends}),
            ):
                with torch.no_grad():
                    cache = layer(self.x, use_cache=True)[2]
                    with self.assertRaises(ValueError) as caught:
                        layer(x, past_key_values=cache, use_cache=True, **more)
                expected = f"[N, HV, K, V] = {[sequences, *state[1:]]}"
                message = f"past_key_values: recurrent_state: got shape {state}, expected {expected}"
                self.assertEqual(str(caught.exception), f"{type(layer).__name__}: {message}")

    def test_a_cache_of_other_convolutions_is_refused(self):
        for layer in layers():
            if not layer.use_short_conv:
                continue
            cache = layer(self.x, use_cache=True)[2][layer.layer_idx]
            shapes = [list(tensor.shape) for tensor in cache["conv_state"]]
            for cut, shape in (
                (lambda tensor: tensor[..., 1:], [2, shapes[2][1], 3]),
                (lambda tensor: tensor[:, 1:], [2, shapes[2][1] - 1, 4]),
                (lambda tensor: tensor[1:], [1, shapes[2][1], 4]),
            ):
                *first, last = cache["conv_state"]
                other = {layer.layer_idx: {**cache, "conv_state": (*first, cut(last))}}
                with self.assertRaises(ValueError) as caught:
                    layer(self.x[:, :1], past_key_values=other, use_cache=True)
                message = f"past_key_values: conv_state: got shape {shape}, expected [N, D, W] = {shapes[2]}"
                self.assertEqual(str(caught.exception), f"{type(layer).__name__}: {message}")

    def test_other_ends_of_packed_sequences_are_refused(self):
        for layer in layers():
            for ends, message in (
                ([0, 11], "cu_seqlens: got list, expected a tensor"),
                (torch.tensor([0.0, 11.0]), "cu_seqlens: got torch.float32, expected torch.int64 or torch.int32"),
                (torch.tensor([[0, 11]]), "cu_seqlens: got shape [1, 2], expected a tensor [N+1]"),
                (torch.tensor([0, 10]), None),
                (torch.tensor([1, 11]), None),
                (torch.tensor([0, 12]), None),
                (torch.tensor([0, 7, 3, 11]), None),
                (torch.tensor([0]), None),
            ):
                with self.assertRaises(ValueError) as caught:
                    layer(self.x[:1], cu_seqlens=ends)
                if message is None:
                    message = f"cu_seqlens: got {ends.tolist()}, expected ends of sequences that rise from 0 to T = 11"
                self.assertEqual(str(caught.exception), f"{type(layer).__name__}: {message}")

    def test_an_empty_batch(self):
        x = self.x[:0]
        for layer in layers():
            for tokens in (0, 1, 11):
                for mask in (None, torch.ones(0, tokens)):
                    with torch.no_grad():
                        y, _, cache = layer(x[:, :tokens], mask, use_cache=True)
                        after = layer(x[:, :1], past_key_values=cache, use_cache=True)[0]
                    self.assertEqual((y.shape, after.shape), ((0, tokens, 24), (0, 1, 24)))
            layer(x)[0].sum().backward()
            self.assertEqual(float(layer.q_proj.weight.grad.abs().sum()), 0)

    def test_a_cache_needs_the_index_of_the_layer(self):
        layer = DeltaNet(hidden_size=24, num_heads=2)
        for given in ({"use_cache": True}, {"past_key_values": {}}, {"past_key_values": {}, "use_cache": True}):
            with self.assertRaises(ValueError) as caught:
                layer(self.x, **given)
            message = "DeltaNet: layer_idx: got None, expected the index of the layer, which a cache needs"
            self.assertEqual(str(caught.exception), message)
        self.assertIsNone(layer(self.x)[2])

    def test_further_keywords(self):
        layer, cu_seqlens = DeltaNet(hidden_size=24, num_heads=2), torch.tensor([0, 11])
        x = self.x[:1]
        more = {"cu_seqlens_cpu": cu_seqlens, "position_ids": torch.arange(11).unsqueeze(0), "attnres_states": None}
        self.assertTrue(torch.equal(layer(x, cu_seqlens=cu_seqlens, **more)[0], layer(x, cu_seqlens=cu_seqlens)[0]))
        for more, got in (
            ({"position_ids": torch.arange(11).unsqueeze(0)}, "position_ids: got a tensor of shape [1, 11]"),
            ({"cu_seq_lens": cu_seqlens}, "cu_seq_lens: got a tensor of shape [2]"),
            ({"window": 4}, "window: got 4"),
        ):
            with self.assertRaises(ValueError) as caught:
                layer(x, **more)
            self.assertEqual(str(caught.exception), f"DeltaNet: {got}, expected no such keyword")

    def test_the_function_of_the_gate(self):
        gated = {name: GatedDeltaNet(24, head_dim=8, num_heads=2, output_gate_activation=name) for name in ("swish", "silu", "sigmoid")}
        for layer in gated.values():
            layer.load_state_dict(gated["swish"].state_dict())
        self.assertTrue(torch.equal(gated["swish"](self.x)[0], gated["silu"](self.x)[0]))
        self.assertFalse(torch.equal(gated["swish"](self.x)[0], gated["sigmoid"](self.x)[0]))

    def test_parameters_start_again(self):
        for layer in layers():
            with torch.device("meta") if hasattr(torch, "get_default_device") else contextlib.nullcontext():
                again = type(layer)(**ARGUMENTS[type(layer).__name__])
            again = again.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in again.parameters():
                    parameter.fill_(float("nan"))
            for module in again.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            self.assertTrue(torch.isfinite(again(self.x)[0]).all(), type(layer).__name__)
            for name in ("A_log", "dt_bias"):
                if hasattr(again, name):
                    self.assertTrue(getattr(again, name)._no_weight_decay)
                    self.assertGreater(float(getattr(again, name).detach().std()), 0.1, name)

    def test_marks_are_kept(self):
        layer = GatedDeltaNet(24, head_dim=8, num_heads=2)
        for again in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            self.assertTrue(again.A_log._no_weight_decay and again.dt_bias._no_weight_decay)

    def test_A_log_starts_at_zero_for_the_safe_gate_only(self):
        for safe_gate in (False, True):
            A_log = KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=64, safe_gate=safe_gate, lower_bound=-5.0).A_log
            self.assertEqual(bool(A_log.any()), not safe_gate)
            self.assertTrue((0 <= A_log.min()) and A_log.max() <= math.log(16))

    def test_decay_parameters_are_float32_for_any_default_dtype(self):
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        for make in (GatedDeltaNet, KimiDeltaAttention):
            layer = make(hidden_size=24, head_dim=8, num_heads=2)
            self.assertEqual(layer.q_proj.weight.dtype, torch.bfloat16)
            for parameter in (layer.A_log, layer.dt_bias):
                self.assertEqual(parameter.dtype, torch.float32)
            y, _, _ = layer(torch.randn(1, 5, 24))
            self.assertEqual(y.dtype, torch.bfloat16)

    def test_gradients_reach_every_parameter(self):
        for layer in layers():
            layer(self.x)[0].square().sum().backward()
            for name, parameter in layer.named_parameters():
                self.assertTrue(torch.isfinite(parameter.grad).all(), name)
                self.assertGreater(float(parameter.grad.abs().sum()), 0, name)

    def test_bfloat16(self):
        for layer in layers():
            whole = layer(self.x)[0]
            half = layer.bfloat16()(self.x.bfloat16())[0]
            self.assertEqual(half.dtype, torch.bfloat16)
            assert_close(self, half, whole, torch.bfloat16, factor=3, what=type(layer).__name__)

    def test_every_rule(self):
        for name, rule in RULES.items():
            torch.manual_seed(0)
            layer = Mixer(Sizes(24, 2, 2, 12, 12), rule)
            y = layer(self.x)[0]
            self.assertTrue(torch.isfinite(y).all(), name)
            self.assertEqual("alpha" in dict(layer.named_parameters()), name == "efla-adaptive")
            same = EFLA(hidden_size=24, num_heads=2, rule=name)
            same.load_state_dict(layer.state_dict())
            self.assertTrue(torch.equal(same(self.x)[0], y), name)

    def test_rules_of_the_library(self):
        for name, rule in (
            ("deltanet-neg-fla", Rule("euler", erase_scale=2.0, write_scale=2.0, qk_norm="l2")),
            ("efla-adaptive", Rule("exact", adaptive=True)),
            ("efla-loose", Rule("exact", beta="softplus")),
            ("rk4", Rule("rk4")),
            ("gdn", Rule("euler", qk_norm="l2", decay="scalar")),
            ("kda-exact", Rule("exact", qk_norm="l2", decay="channel")),
            ("efla-kda", Rule("exact", decay="channel", lower_bound=-5.0, safe_gate=True)),
            ("linear", Rule("euler", erase_scale=0.0, beta="one")),
        ):
            self.assertEqual(RULES[name], rule)
        self.assertNotIn("softmax", RULES)
        with self.assertRaisesRegex(RuntimeError, "got 'softmax', expected a mixer with a delta rule"):
            torch.ops.efla.mixer_rule("softmax")
        with self.assertRaisesRegex(RuntimeError, "got 'elfa', expected one of deltanet, .* .nearest: efla."):
            torch.ops.efla.mixer_rule("elfa")

    def test_mistakes(self):
        for build, message in (
            (lambda: EFLA(rule="elfa"), "EFLA: rule: got 'elfa', expected one of deltanet, "),
            (lambda: DeltaNet(mode="fused_chunk"), "DeltaNet: mode: got 'fused_chunk', expected one of ('chunk', "),
            (lambda: DeltaNet(hidden_size=10, num_heads=3), "DeltaNet: hidden_size * expand_k / num_heads: got 3.33"),
            (lambda: GatedDeltaNet(num_heads=4, num_v_heads=6), "mixer: num_v_heads: got 6, expected a multiple of num"),
            (lambda: KimiDeltaAttention(safe_gate=True), "KimiDeltaAttention: lower_bound: got None, expected a number"),
            (lambda: KimiDeltaAttention(lower_bound=2.0), "KimiDeltaAttention: lower_bound: got 2.0, expected None or a number"),
            (lambda: DeltaNet(num_heads=0), "DeltaNet: num_heads: got 0, expected at least 1"),
            (lambda: DeltaNet(hidden_size=24.0, num_heads=2), "mixer: hidden: got 24.0, expected a whole number of at least 1"),
            (lambda: DeltaNet(d_model=0), "mixer: hidden: got 0, expected a whole number of at least 1"),
            (lambda: GatedDeltaNet(num_v_heads=0), "mixer: value_heads: got 0, expected a whole number of at least 1"),
            (lambda: GatedDeltaNet(conv_size=0), "GatedDeltaNet: conv_size: got 0, expected a whole number of at least 1"),
            (lambda: EFLA(conv_size=4.0), "EFLA: conv_size: got 4.0, expected a whole number of at least 1"),
            (lambda: Mixer(Sizes(24, 2, 2, 12, 12), Rule("exact", beta="one ")), "Mixer: beta: got 'one ', expected one of"),
            (lambda: Mixer(Sizes(24, 2, 2, 12, 12), Rule("exact", decay="head")), "Mixer: decay: got 'head', expected one of"),
            (lambda: Mixer(Sizes(24, 2, 2, 12, 12), Rule("exact"), gate="swish"), "Mixer: gate: got 'swish', expected one of"),
        ):
            with self.assertRaises(ValueError) as caught:
                build()
            self.assertTrue(str(caught.exception).startswith(message), caught.exception)

    def test_the_deltanet_layer_is_its_function(self):
        layer = EFLA(hidden_size=24, num_heads=2, use_short_conv=False)
        q, k, v = (getattr(layer, f"{x}_proj")(self.x) for x in "qkv")
        q, k, v = (torch.nn.functional.silu(x).view(2, 11, 2, 12) for x in (q, k, v))
        o = efla.chunk_efla(q, k, v, torch.sigmoid(layer.b_proj(self.x)))[0]
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        assert_close(self, layer(self.x)[0], layer.o_proj(o.flatten(2)))


if __name__ == "__main__":
    unittest.main()
