"""lm-evaluation-harness on a training run, against `efla eval lm`; skipped without lm_eval and without EFLA_PROGRAM."""

import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings
from unittest import mock

PROGRAM = os.environ.get("EFLA_PROGRAM")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests/support/lm_tasks"
CONFIGURATION = """
[model]
mixer = "gdn"
hidden_size = 64
num_hidden_layers = 2
num_heads = 2
intermediate_size = 128

[data]
train = "tokens"
tokenizer = "bytes"

[training]
sequence_length = 128
tokens_per_step = 2048
micro_batch = 4
steps = 30
warmup_steps = 5
lr = 1e-2
min_lr = 1e-3
checkpoint_every = 20
"""


@unittest.skipUnless(all(map(importlib.util.find_spec, ("lm_eval", "accelerate"))), "lm_eval[hf] is not installed")
@unittest.skipUnless(PROGRAM, "EFLA_PROGRAM does not name the program efla")
class Harness(unittest.TestCase):
    def program(self, *arguments):
        done = subprocess.run([os.path.abspath(PROGRAM), *arguments], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_run_has_the_scores_of_the_program(self):
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as self.folder:
            pathlib.Path(self.folder, "run.toml").write_text(CONFIGURATION)
            self.program("data", "tokenize", str(ROOT / "docs/python.md"), "--tokenizer", "bytes", "--out", "tokens")
            self.program("train", "lm", "run.toml", "--out", "run")
            ours = json.loads(self.program("eval", "lm", "run", "--data", str(TASKS), "--json"))["tasks"]
            theirs = self.harness(pathlib.Path(self.folder, "run"))
        self.assertEqual({name.removesuffix("_openai") for name in theirs}, set(ours))
        for name, metrics in theirs.items():
            expected = ours[name.removesuffix("_openai")]
            compared = {key: value for key, value in metrics.items() if key.removesuffix(",none") in expected and "stderr" not in key}
            self.assertTrue(compared, name)
            for key, value in compared.items():
                self.assertAlmostEqual(value / (expected[key.removesuffix(",none")] or 1), 1 if value else 0, 5, f"{name} {key}")

    def harness(self, run):
        import datasets
        import efla.hf
        import lm_eval

        with mock.patch.object(sys, "argv", ["", str(TASKS)]), mock.patch.object(sys, "path", [str(TASKS), *sys.path]):
            local = importlib.import_module("make_harness_golden")  # the tasks from files instead of the network
        with mock.patch.object(datasets, "load_dataset", local.load_dataset):
            return lm_eval.simple_evaluate(
                model="hf",
                model_args=f"pretrained={efla.hf.checkpoint(run)},dtype=float32,max_length=2048",
                device="cpu",
                tasks=local.TASKS,
                log_samples=False,
                bootstrap_iters=0,
            )["results"]


if __name__ == "__main__":
    unittest.main()
