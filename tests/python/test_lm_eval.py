"""lm-evaluation-harness on a training run and its server, against `efla eval lm`; skipped without lm_eval and without EFLA_PROGRAM."""

import importlib
import importlib.util
import json
import math
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
TASK = """
task: local
dataset_path: json
dataset_kwargs:
  data_files: {}
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


def installed(*packages):
    return all(map(importlib.util.find_spec, packages))


@unittest.skipUnless(installed("lm_eval", "datasets"), "lm_eval is not installed")
@unittest.skipUnless(PROGRAM, "EFLA_PROGRAM does not name the program efla")
class Harness(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        (cls.folder / "run.toml").write_text(CONFIGURATION)
        with mock.patch.object(sys, "argv", ["", str(TASKS)]), mock.patch.object(sys, "path", [str(TASKS), *sys.path]):
            cls.local = importlib.import_module("make_harness_golden")  # the tasks from files instead of the network
        cls.program("data", "tokenize", str(ROOT / "docs/python.md"), "--tokenizer", "bytes", "--out", "tokens")
        cls.program("train", "lm", "run.toml", "--out", "run")
        scores = cls.program("eval", "lm", "run", "--data", str(TASKS), "--max-length", str(cls.local.MAX_LENGTH), "--json")
        cls.expected = json.loads(scores)["tasks"]

    @classmethod
    def program(cls, *arguments):
        done = subprocess.run([os.path.abspath(PROGRAM), *arguments], cwd=cls.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return done.stdout

    def assert_scores(self, **model):
        """Fails unless the harness has every score of the program with this model.

        Perplexities are compared by their logarithms, because these are the log-likelihoods that float32 rounds.
        """
        import datasets
        import lm_eval

        warnings.simplefilter("ignore")
        with mock.patch.object(datasets, "load_dataset", self.local.load_dataset):
            results = lm_eval.simple_evaluate(**model, tasks=self.local.TASKS, log_samples=False, bootstrap_iters=0)["results"]
        self.assertEqual({name.removesuffix("_openai") for name in results}, set(self.expected))
        for name, metrics in results.items():
            expected = self.expected[name.removesuffix("_openai")]
            metrics = {key.removesuffix(",none"): value for key, value in metrics.items()}
            compared = {key for key in metrics.keys() & expected if "stderr" not in key}
            self.assertTrue(compared, name)
            for key in compared:
                scale = math.log if "perplexity" in key else float
                value = scale(expected[key])
                self.assertAlmostEqual(scale(metrics[key]), value, delta=1e-6 * value, msg=f"{name} {key}")

    @unittest.skipUnless(installed("accelerate"), "lm_eval[hf] is not installed")
    def test_the_model_of_transformers_has_the_scores_of_the_program(self):
        import efla.hf

        checkpoint = efla.hf.checkpoint(self.folder / "run")
        arguments = f"pretrained={checkpoint},dtype=float32,max_length={self.local.MAX_LENGTH}"
        self.assert_scores(model="hf", model_args=arguments, device="cpu")

    @unittest.skipUnless(installed("accelerate"), "lm_eval[hf] is not installed")
    def test_the_command_line_scores_a_checkpoint(self):
        import efla.hf

        docs = [{"text": "The state", "target": " forgets"}, {"text": "What a key", "target": " erases"}]
        (self.folder / "docs.json").write_text(json.dumps(docs))
        (self.folder / "local.yaml").write_text(TASK.format(self.folder / "docs.json"))
        model = f"pretrained={efla.hf.checkpoint(self.folder / 'run')},trust_remote_code=True,dtype=float32"
        command = [sys.executable, "-W", "ignore", "-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--tasks", "local"]
        command += ["--include_path", str(self.folder), "--device", "cpu", "--output_path", str(self.folder / "scores")]
        environment = {**os.environ, "HF_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        got = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(got.returncode, 0, got.stderr)
        (results,) = (self.folder / "scores").rglob("results_*.json")
        self.assertGreater(json.loads(results.read_text())["results"]["local"]["perplexity,none"], 1)

    @unittest.skipUnless(installed("aiohttp", "tenacity"), "lm_eval[api] is not installed")
    def test_the_server_has_the_scores_of_the_program(self):
        command = [os.path.abspath(PROGRAM), "serve", "run", "--port", "0"]
        server = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.communicate)
        self.addCleanup(server.kill)
        _, name, _, address = server.stdout.readline().split()
        # One token more because the last one is not read, and one for the token that the harness lets the server add.
        length = self.local.MAX_LENGTH + 2
        arguments = f"model={name},base_url={address}/v1/completions,tokenizer_backend=remote,max_length={length}"
        self.assert_scores(model="local-completions", model_args=arguments)
        server.terminate()
        self.assertEqual(server.wait(), 0)


if __name__ == "__main__":
    unittest.main()
