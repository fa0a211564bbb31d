"""patch_transformers on small models with random weights, against transformers' own reference; skipped without transformers."""

import importlib
import importlib.util
import inspect
import unittest
import warnings
from unittest import mock

import torch
from support import assert_close, inputs, state

import efla

HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
KIMI = {
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
MODELS = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**HEADS, "head_dim": 16}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**HEADS, **EXPERTS, "head_dim": 16}),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", HEADS),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", {**KIMI, "layer_types": LAYERS}),
}
EVERY = (*MODELS, "qwen3_5_moe", "qwen4_exp", "bailing_hybrid", "glm5_next")
NAMES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


def delta_rules(module):
    """Returns the module's delta rules by name."""
    return {name: getattr(module, name) for name in NAMES if hasattr(module, name)}


def references(module):
    """Returns the same without flash-linear-attention's functions."""
    return {name: inspect.unwrap(function) for name, function in delta_rules(module).items()}


@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
class Transformers(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore")  # of flash-linear-attention, that there is no GPU

    def make(self, model):
        config_name, model_name, extra = MODELS[model]
        modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
        torch.manual_seed(0)
        made = getattr(modeling, model_name)(getattr(configuration, config_name)(**{**SMALL, **extra})).eval()
        return modeling, made

    def check(self, model):
        modeling, made = self.make(model)
        ids = torch.randint(3, 96, (2, 90))

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
            self.assertEqual(set(patch.functions) | set(patch.missing), set(EVERY))
            for model, names in patch.functions.items():
                modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
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

    def test_what_is_not_computed_is_computed_as_before(self):
        modeling, made = self.make("qwen3_5")
        half, ids = made.half(), torch.randint(3, 96, (1, 20))
        with torch.no_grad(), efla.patch_transformers():
            with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=AssertionError):
                logits = half(ids).logits
        self.assertTrue(torch.isfinite(logits).all())

    def test_patches_nest(self):
        modeling, _ = self.make("qwen3_5")
        before = modeling.torch_chunk_gated_delta_rule
        first = efla.patch_transformers()
        second = efla.patch_transformers()
        second.undo()
        self.assertIsNot(modeling.torch_chunk_gated_delta_rule, before)
        first.undo()
        self.assertIs(modeling.torch_chunk_gated_delta_rule, before)


if __name__ == "__main__":
    unittest.main()
