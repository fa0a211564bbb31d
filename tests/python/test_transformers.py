"""patch_transformers on small models with random weights, against transformers' own reference; skipped without transformers."""

import importlib
import importlib.util
import inspect
import unittest
import warnings
from unittest import mock

import torch
from support import assert_close, inputs, state
from transformers_models import MODELS, Sizes, make

import efla

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SMALL = Sizes(
    vocabulary=96,
    width=32,
    inner_width=48,
    layers=4,
    positions=256,
    heads=2,
    kv_heads=1,
    head_dim=16,
    delta_heads=2,
    delta_value_heads=4,
    delta_key_dim=16,
    delta_value_dim=8,
    latent=16,
    rope_dim=8,
    experts=4,
    expert_width=16,
)
EVERY = (*MODELS, "qwen3_5_moe", "qwen4_exp", "bailing_hybrid", "glm5_next", "lara_mini")
NAMES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
OURS = dict(
    zip(NAMES, (efla.chunk_gated_delta_rule, efla.fused_recurrent_gated_delta_rule, efla.chunk_kda, efla.fused_recurrent_kda))
)


def delta_rules(module):
    """Returns the module's delta rules by name."""
    return {name: getattr(module, name) for name in NAMES if hasattr(module, name)}


def modeling_of(model):
    """Returns the module of a model's code."""
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def references(module):
    """Returns the same without flash-linear-attention's functions."""
    return {name: inspect.unwrap(function) for name, function in delta_rules(module).items()}


@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
class Transformers(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore")  # of flash-linear-attention, that there is no GPU

    def check(self, model):
        for device in DEVICES:
            with self.subTest(device=device):
                self.check_on(device, model)

    def check_on(self, device, model):
        modeling, made = make(model, SMALL)
        made, ids = made.to(device), torch.randint(3, 96, (2, 90), device=device)

        def run():
            out = made(ids, use_cache=True)
            parts, cache = [out.logits], out.past_key_values
            for _ in range(3):
                out = made(parts[-1][:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
                parts.append(out.logits)
            loss = made(ids, labels=ids).loss
            return torch.cat(parts, 1), loss

        with torch.no_grad(), mock.patch.multiple(modeling, **references(modeling)):
            expected, expected_loss = run()
        originals = delta_rules(modeling)
        with efla.patch_transformers() as patch:
            self.assertEqual(set(patch.functions[model]), set(originals))
            self.assertIn(f"{model}: ", str(patch))
            for name, function in delta_rules(modeling).items():
                self.assertIs(function.efla_replaces, originals[name])
            with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=torch.ops.efla.delta_rule) as operator:
                with torch.no_grad():
                    got, _ = run()
            _, loss = run()
            loss.backward()
        self.assertEqual(operator.call_count, 5 * 3)  # of three layers: a prefill, three tokens and a loss
        self.assertEqual(delta_rules(modeling), originals)
        assert_close(self, got, expected, factor=20, what=model)
        self.assertTrue(torch.equal(got.argmax(-1), expected.argmax(-1)), model)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
        gradients = [p.grad for n, p in made.named_parameters() if "linear_attn" in n or "A_log" in n]
        self.assertTrue(gradients and all(g is not None and torch.isfinite(g).all() for g in gradients))

    def test_qwen3_5(self):
        self.check("qwen3_5")

    def test_qwen3_next(self):
        self.check("qwen3_next")

    def test_olmo_hybrid(self):
        self.check("olmo_hybrid")

    def test_kimi_linear(self):
        self.check("kimi_linear")

    def test_functions_of_every_model(self):
        with efla.patch_transformers() as patch:
            there = {model for model in EVERY if importlib.util.find_spec(f"transformers.models.{model}")}
            self.assertLessEqual({model for model in there if delta_rules(modeling_of(model))}, set(patch.functions))
            self.assertEqual((repr(patch), patch.missing), (str(patch), []))
            for model, names in patch.functions.items():
                modeling = modeling_of(model)
                for name in names:
                    kimi, tokens = "kimi" in name, 1 if "recurrent" in name else 70
                    x = inputs(tokens=tokens, decay="channel" if kimi else "scalar")
                    x = {{"q": "query", "k": "key", "v": "value"}.get(letter, letter): t for letter, t in x.items()}
                    x["initial_state"] = state()
                    x.update(output_final_state=True, use_qk_l2norm_in_kernel=True, a_keyword_of_the_model=None)
                    adapter = getattr(modeling, name)
                    expected = inspect.unwrap(adapter)(**x)
                    with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=torch.ops.efla.delta_rule) as operator:
                        got = adapter(**x)
                    self.assertEqual(operator.call_count, 1)
                    for a, b in zip(got, expected):
                        assert_close(self, a, b, what=f"{model} {name}")

    def test_float16(self):
        modeling, made = make("qwen3_5", SMALL)
        half, ids = made.half(), torch.randint(3, 96, (1, 20))
        with torch.no_grad(), mock.patch.multiple(modeling, **references(modeling)):
            expected = half(ids).logits
        with torch.no_grad(), efla.patch_transformers():
            with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=torch.ops.efla.delta_rule) as operator:
                logits = half(ids).logits
        self.assertEqual(operator.call_count, 3)
        assert_close(self, logits, expected, dtype=torch.float16, factor=5)

    def test_what_is_not_computed_is_computed_as_before(self):
        modeling, made = make("qwen3_5", SMALL)
        ids = torch.randint(3, 96, (1, 20))
        with torch.no_grad(), efla.patch_transformers(), mock.patch("efla._transformers._is_exporting", return_value=True):
            with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=AssertionError):
                logits = made(ids).logits
        with torch.no_grad(), mock.patch.multiple(modeling, **references(modeling)):
            self.assertTrue(torch.equal(logits, made(ids).logits))

    def test_what_the_functions_refuse_is_computed_as_before(self):
        with efla.patch_transformers() as patch:
            for model, names in patch.functions.items():
                for name in names:
                    adapter = getattr(modeling_of(model), name)
                    reference = inspect.unwrap(adapter)
                    x = inputs(tokens=1 if "recurrent" in name else 10, decay="channel" if "kimi" in name else "scalar")
                    x = {{"q": "query", "k": "key", "v": "value"}.get(letter, letter): tensor for letter, tensor in x.items()}
                    x.update(initial_state=state(), output_final_state=True)
                    for what, changed in (
                        ("values in bfloat16", {"value": x["value"].bfloat16()}),
                        ("keys in float16", {"key": x["key"].half()}),
                        ("whole numbers in g", {"g": x["g"].long()}),
                        ("whole numbers in beta", {"beta": x["beta"].round().long()}),
                    ):
                        expected = reference(**{**x, **changed})
                        for a, b in zip(adapter(**{**x, **changed}), expected):
                            self.assertTrue(torch.equal(a, b), f"{model} {name}: {what}")

    def test_chunk_size_by_name_and_by_position(self):
        modeling = modeling_of("qwen3_5")
        x = inputs(tokens=10, decay="scalar")
        arguments = [x["q"], x["k"], x["v"], x["g"], x["beta"]]
        expected = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)(*arguments)
        with efla.patch_transformers(), mock.patch.object(torch.ops.efla, "delta_rule", side_effect=torch.ops.efla.delta_rule) as operator:
            for more, named in (((), {"chunk_size": 4}), ((64,), {}), ((), {"chunk_size": 48})):
                got = modeling.torch_chunk_gated_delta_rule(*arguments, *more, **named)
                assert_close(self, got[0], expected[0])
                self.assertIsNone(got[1])
        self.assertEqual(operator.call_count, 3)

    def test_packed_texts(self):
        modeling = modeling_of("kimi_linear")
        x, ends = inputs(batch=1, tokens=10, decay="channel"), torch.tensor([0, 4, 10], dtype=torch.int32)
        named = {"query": x["q"], "key": x["k"], "value": x["v"], "g": x["g"], "beta": x["beta"]}
        expected = efla.chunk_kda(**x, cu_seqlens=ends)[0]
        with efla.patch_transformers():
            for keyword in ("cu_seqlens", "cu_seq_lens_q"):
                self.assertTrue(torch.equal(modeling.chunk_kimi_delta_attention(**named, **{keyword: ends})[0], expected))
            # A call with packed texts that the functions refuse never reaches a function that ignores the packing.
            for bad in ({"cu_seqlens": ends, "key": x["k"].half()}, {"seq_idx": torch.zeros(1, 10, dtype=torch.int32)}):
                with self.assertRaises((TypeError, ValueError)):
                    modeling.chunk_kimi_delta_attention(**{**named, **bad})

    def test_a_function_with_other_arguments_is_left_alone(self):
        modeling = modeling_of("qwen3_5")

        def other(query, key, value, g, beta, window):
            raise AssertionError

        with mock.patch.object(modeling, "torch_chunk_gated_delta_rule", other), efla.patch_transformers() as patch:
            self.assertIs(modeling.torch_chunk_gated_delta_rule, other)
            self.assertEqual(patch.functions["qwen3_5"], ["torch_recurrent_gated_delta_rule"])
            self.assertEqual(patch.missing, ["qwen3_5"])
            self.assertIn("left alone: qwen3_5", str(patch))

    def test_defaults_are_those_of_transformers(self):
        with efla.patch_transformers() as patch:
            for model, names in patch.functions.items():
                for name in names:
                    theirs = inspect.signature(inspect.unwrap(getattr(modeling_of(model), name))).parameters
                    ours = inspect.signature(OURS[name]).parameters
                    for argument, parameter in theirs.items():
                        if argument in ours and argument != "chunk_size" and parameter.default is not parameter.empty:
                            self.assertEqual(ours[argument].default, parameter.default, f"{model} {name} {argument}")

    def test_patches_nest(self):
        modeling, _ = make("qwen3_5", SMALL)
        before = modeling.torch_chunk_gated_delta_rule
        first = efla.patch_transformers()
        second = efla.patch_transformers()
        second.undo()
        self.assertIsNot(modeling.torch_chunk_gated_delta_rule, before)
        first.undo()
        self.assertIs(modeling.torch_chunk_gated_delta_rule, before)


if __name__ == "__main__":
    unittest.main()
