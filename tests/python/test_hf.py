"""Language models as transformers' models; skipped without transformers, and the comparison with the program without EFLA_PROGRAM."""

import copy
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

import torch
from support import assert_close, enlarge_weights, import_hf

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
PROGRAM = os.environ.get("EFLA_PROGRAM")
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 2, "intermediate_size": 48}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
CASES = [
    ("EflaConfig", {}),
    ("EflaConfig", {"mixer": "efla-adaptive", "attn": ATTENTION, "tie_word_embeddings": True}),
    ("EflaConfig", {"mixer": "efla-gdn", "num_v_heads": 4, "head_dim": 8, "expand_v": 0.5, "use_output_norm": False}),
    ("EflaConfig", {"mixer": "efla-kda", "use_beta": False, "conv_size": 3}),
    ("EflaConfig", {"mixer": "deltanet-neg", "use_short_conv": False, "use_gate": True, "qk_activation": "elu"}),
    ("EflaConfig", {"mixer": "softmax"}),
    ("DeltaNetConfig", {"expand_v": 0.5, "use_gate": True, "allow_neg_eigval": True}),
    ("DeltaNetConfig", {"qk_norm": "sum", "qk_activation": "relu"}),
    ("GatedDeltaNetConfig", {"head_dim": 16, "num_v_heads": 4, "attn": ATTENTION}),
    ("KDAConfig", {"head_dim": 16, "safe_gate": True, "lower_bound": -4.0}),
]


@unittest.skipUnless(HAS_TRANSFORMERS, "transformers is not installed")
class Models(unittest.TestCase):
    def setUp(self):
        self.transformers, self.hf = import_hf()

    def models(self, device="cpu"):
        for name, fields in CASES:
            torch.manual_seed(0)
            model = self.transformers.AutoModelForCausalLM.from_config(getattr(self.hf, name)(**SMALL, **fields)).eval()
            enlarge_weights(model)
            yield f"{name} {fields} on {device}", model.to(device)

    def test_the_program_computes_the_same(self):
        if PROGRAM is None:
            self.skipTest("EFLA_PROGRAM does not name the program efla")
        from safetensors.torch import load_file, save_file

        ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
        for name, model in self.models():
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                files = [str(pathlib.Path(folder, f"{part}.safetensors")) for part in ("ids", "logits")]
                save_file({"input_ids": ids}, files[0])
                command = [PROGRAM, "logits", folder, "--ids", files[0], "--out", files[1]]
                got = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual(got.returncode, 0, f"{name}: {got.stderr}")
                expected = load_file(files[1])["logits"]
            with torch.no_grad():
                assert_close(self, model(ids).logits, expected, factor=4, what=name)

    def test_the_program_names_the_same_classes(self):
        if PROGRAM is None:
            self.skipTest("EFLA_PROGRAM does not name the program efla")
        for name, model in self.models():
            with tempfile.TemporaryDirectory() as folder:
                first, second = pathlib.Path(folder, "first"), pathlib.Path(folder, "second")
                model.save_pretrained(first)
                got = subprocess.run([PROGRAM, "export", str(first), "--out", str(second)], capture_output=True, text=True)
                self.assertEqual(got.returncode, 0, f"{name}: {got.stderr}")
                self.assertEqual((first / "efla_model.py").read_text(), (second / "efla_model.py").read_text())
                maps = [json.loads((each / "config.json").read_text())["auto_map"] for each in (first, second)]
                self.assertEqual(*maps, name)

    def test_decoding_padding_and_beams(self):
        for device in DEVICES:
            factor = 4 if device == "cpu" else 20  # a GPU's products of other sizes sum in other orders
            ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
            mask = torch.ones_like(ids)
            mask[1, :5] = 0
            for name, model in self.models(device):
                with torch.no_grad():
                    whole = model(ids).logits
                    parts, cache = [], None
                    for begin, end in ((0, 7), (7, 8), (8, 12)):
                        out = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
                        cache = out.past_key_values
                        parts.append(out.logits)
                    assert_close(self, torch.cat(parts, 1), whole, factor=factor, what=name)
                    padded = model(ids, attention_mask=mask).logits[1, 5:]
                    assert_close(self, padded, model(ids[1:, 5:]).logits[0], factor=factor, what=f"{name} padding")
                    assert_close(self, model(ids, logits_to_keep=1).logits, whole[:, -1:], factor=factor / 4, what=name)
                options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                alone = model.generate(ids[1:, 5:], **options)[0, 7:]
                together = model.generate(ids, attention_mask=mask, **options)[1, 12:]
                self.assertEqual(alone.tolist(), together.tolist(), name)
                slow = model.generate(ids, use_cache=False, num_beams=3, **options)
                self.assertEqual(model.generate(ids, num_beams=3, **options).tolist(), slow.tolist(), name)

    @unittest.skipUnless(torch.cuda.is_available(), "no GPU that this PyTorch can use")
    def test_a_gpu_computes_the_same(self):
        ids = torch.randint(3, 61, (2, 80), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :30] = 0
        for (name, model), (_, moved) in zip(self.models(), self.models("cuda")):
            results = []
            for each in (model, moved):
                given = {"input_ids": ids.to(each.device), "attention_mask": mask.to(each.device)}
                out = each(**given, labels=ids.masked_fill(mask == 0, -100).to(each.device))
                out.loss.backward()
                gradients = {n: p.grad.cpu() for n, p in each.named_parameters()}
                options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                results.append((out.logits.cpu(), gradients, each.generate(**given, **options)[:, 80:].tolist()))
            (expected, expected_gradients, expected_tokens), (got, gradients, tokens) = results
            seen = mask.bool()
            assert_close(self, got[seen], expected[seen], factor=20, what=name)
            for n, gradient in gradients.items():
                assert_close(self, gradient, expected_gradients[n], factor=100, what=f"{name} d{n}")
            self.assertEqual(tokens, expected_tokens, name)

    def test_files_and_training(self):
        for device in DEVICES:
            ids = torch.randint(61, (2, 20)).to(device)
            for name, model in self.models(device):
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    again, problems = self.transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
                self.assertIs(type(again), type(model))
                self.assertFalse(any(problems.values()), problems)
                self.assertTrue(torch.equal(again.to(device)(ids).logits, model(ids).logits), name)
                model.train()
                out = model(ids, labels=ids)
                expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                torch.testing.assert_close(out.loss, expected)
                out.loss.backward()
                gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
                model.zero_grad()
                model.gradient_checkpointing_enable()
                model(ids, labels=ids).loss.backward()
                for n, p in model.named_parameters():
                    if device == "cpu":
                        self.assertTrue(torch.equal(p.grad, gradients[n]), f"{name} {n}")
                    else:  # PyTorch's attention adds up its gradients in any order
                        assert_close(self, p.grad, gradients[n], factor=20, what=f"{name} {n}")
                copy.deepcopy(model).bfloat16()(ids)

    def test_outputs(self):
        ids = torch.randint(61, (2, 9))
        for name, model in self.models():
            with torch.no_grad():
                out = model(ids, output_hidden_states=True, use_cache=False)
                self.assertEqual(len(out.hidden_states), SMALL["num_hidden_layers"] + 1, name)
                assert_close(self, out.hidden_states[0], model.get_input_embeddings()(ids), factor=1, what=name)
                assert_close(self, model.lm_head(out.hidden_states[-1]), out.logits, factor=4, what=f"{name} last")
                self.assertIsNone(model(ids).hidden_states)
                for part in (model, model.model):
                    self.assertIs(type(part(ids, return_dict=False)), tuple, name)
                model.config.output_hidden_states, model.config.return_dict = True, False
                logits, hidden_states = model(ids, use_cache=False)
                self.assertTrue(torch.equal(logits, out.logits), name)
                self.assertEqual(len(hidden_states), len(out.hidden_states), name)

    def test_a_static_cache(self):
        ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": mask}
        for name, model in self.models():
            static = model.generate(ids, cache_implementation="static", **options)
            self.assertEqual(static.tolist(), model.generate(ids, **options).tolist(), name)

    def test_weights_that_a_checkpoint_lacks_start_as_in_a_new_model(self):
        junk = [torch.full((100_000,), 1e30) for _ in range(20)]  # what uninitialised memory may then contain
        del junk
        for name, model in self.models():
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                grown = self.transformers.AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=4)
                torch.manual_seed(0)
                new = self.transformers.AutoModelForCausalLM.from_config(grown.config)
            held = model.state_dict()
            for n, parameter in grown.named_parameters():
                if n in held:
                    self.assertTrue(torch.equal(parameter, held[n]), f"{name} {n}")
                    continue
                expected = new.get_parameter(n)
                self.assertTrue(torch.isfinite(parameter).all(), f"{name} {n}")
                self.assertEqual(float(parameter.detach().abs().max()) > 0, float(expected.detach().abs().max()) > 0, f"{name} {n}")
                if expected.detach().unique().numel() == 1:  # ones, zeros and alpha
                    self.assertTrue(torch.equal(parameter, expected), f"{name} {n}")
                else:
                    self.assertLess(float(parameter.detach().abs().max()), 3 * float(expected.detach().abs().max()), f"{name} {n}")

    def test_new_models_start_as_those_of_flash_linear_attention(self):
        for name, fields in (
            ("DeltaNet", {"use_gate": True}),
            ("GatedDeltaNet", {"head_dim": 32}),
            ("KDA", {"head_dim": 32}),
            ("KDA", {"head_dim": 32, "lower_bound": -5.0}),
            ("KDA", {"head_dim": 32, "lower_bound": -5.0, "safe_gate": True}),
        ):
            sizes = {"vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 1, "num_heads": 4, **fields}
            torch.manual_seed(0)
            model = getattr(self.hf, f"{name}ForCausalLM")(getattr(self.hf, f"{name}Config")(**sizes))
            for n, p in model.named_parameters():
                if p.dim() > 1:  # normal with initializer_range
                    self.assertLess(abs(float(p.detach().std()) - 0.02), 0.004, f"{name} {n}")
            if importlib.util.find_spec("fla") is None:
                continue
            import fla.models

            theirs = getattr(fla.models, f"{name}ForCausalLM")(getattr(fla.models, f"{name}Config")(**sizes))
            self.assertEqual(set(theirs.state_dict()), set(model.state_dict()))
            for n, p in model.named_parameters():
                a, b = p.detach().flatten(), theirs.get_parameter(n).detach().flatten()
                spread = float(b.std())
                # Of n numbers with this deviation the mean deviates by spread / sqrt(n).
                self.assertLess(abs(float(a.mean() - b.mean())), 6 * spread / len(a) ** 0.5 + 1e-6, f"{name} {n}")
                self.assertLess(abs(float(a.std()) - spread), 6 * spread / len(a) ** 0.5 + 1e-6, f"{name} {n}")

    def test_the_attention_that_transformers_chooses(self):
        for name, model in self.models():
            again = self.transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")
            self.assertEqual(type(again), type(model), name)

    def test_a_program_that_does_not_import_the_package(self):
        program = """
            import sys
            from transformers import AutoModelForCausalLM
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
            model.save_pretrained(sys.argv[2])
            print(type(model).__name__)
        """
        for name, model in self.models():
            with tempfile.TemporaryDirectory() as folder:
                first, second = pathlib.Path(folder, "first"), pathlib.Path(folder, "second")
                model.save_pretrained(first)
                command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(first), str(second)]
                got = subprocess.run(command, env={**os.environ, "HF_HOME": folder}, capture_output=True, text=True)
                self.assertEqual((got.returncode, got.stdout.strip()), (0, type(model).__name__), got.stderr)
                self.assertEqual(sorted(os.listdir(first)), sorted(os.listdir(second)), name)
                self.assertEqual((first / "config.json").read_text(), (second / "config.json").read_text(), name)

    def test_the_latest_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            run = pathlib.Path(folder, "run")
            with self.assertRaisesRegex(FileNotFoundError, "checkpoint: run: got .*run, expected a folder with config.json or"):
                self.hf.checkpoint(run)
            for name in ("step-000030", "step-1000000", "step-000200.part", "other"):
                (run / "checkpoints" / name).mkdir(parents=True)
                (run / "checkpoints" / name / "config.json").write_text("{}")
            (run / "checkpoints/step-2000000").mkdir()
            self.assertEqual(self.hf.checkpoint(str(run)), str(run / "checkpoints/step-1000000"))
            (run / "config.json").write_text("{}")
            self.assertEqual(self.hf.checkpoint(run), str(run))

    def test_mistakes(self):
        for fields, message in (
            ({"mixer": "elfa"}, "config: mixer: got 'elfa', expected one of deltanet, "),
            ({"hidden_act": "gelu"}, "config: hidden_act: got 'gelu', expected 'swish' or 'silu'"),
            ({"attn": {"layers": [1], "window_size": 64}}, "config: attn: window_size: got 64, expected None"),
            ({"attn": {"layer": [1]}}, "config: attn: layer: got [1], expected 'no such field'"),
            ({"attn": {"layers": [24]}}, "config: attn: layers: got [24], expected different layers from 0 to 23"),
            ({"attn": {"layers": [1, 1]}}, "config: attn: layers: got [1, 1], expected different layers from 0 to 23"),
            ({"allow_neg_eigval": True}, "config: allow_neg_eigval: got True, expected False: efla has no step of Euler's"),
            ({"qk_norm": "sum"}, "config: qk_norm: got 'sum', expected None: efla takes q and k as they are"),
            ({"mixer": "kda", "qk_norm": "L2"}, "config: qk_norm: got 'L2', expected 'l2' or 'sum'"),
            ({"mixer": "gdn", "safe_gate": True}, "config: safe_gate: got True, expected none, as gdn has no decay by channel"),
            ({"lower_bound": -1.0}, "config: lower_bound: got -1.0, expected none, as efla has no decay by channel"),
            ({"mixer": "efla-kda", "lower_bound": -9}, "config: lower_bound: got -9, expected a number in [-5, 0)"),
        ):
            with self.assertRaises(ValueError) as caught:
                self.hf.EflaConfig(**fields)
            self.assertTrue(str(caught.exception).startswith(message), caught.exception)
        with self.assertRaisesRegex(ValueError, "config: qk_norm: got 'sum', expected no such field, as model_type is kda"):
            self.hf.KDAConfig(qk_norm="sum")
        with self.assertRaisesRegex(ValueError, r"config: lower_bound: got None, expected a number in \[-5, 0\), as safe_gate is True"):
            self.hf.KDAConfig(safe_gate=True)


if __name__ == "__main__":
    unittest.main()
