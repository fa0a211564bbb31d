"""examples/ as printed: the notebook's cells in order, and the training script."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


class TestExamples(unittest.TestCase):
    def test_the_notebook_runs(self):
        cells = json.loads((EXAMPLES / "delta_rule.ipynb").read_text())["cells"]
        names, printed = {}, []
        for cell in cells:
            if cell["cell_type"] == "code":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec("".join(cell["source"]), names)
                printed.append(out.getvalue())
        self.assertIn("outputs (1, 64, 2, 32)", printed[0])

    def test_the_training_script_learns_and_continues_a_text(self):
        line = "The state forgets what a key erases, and keeps the rest. "
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text.txt"
            text.write_text(line * 20)
            command = [sys.executable, EXAMPLES / "train_bytes.py", text, "--steps", "50", "--layer", "gdn"]
            done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        last = [row for row in done.stdout.splitlines() if row.startswith("step 50: ")]
        self.assertLess(float(last[0].split()[2]), 1.0, "nats per byte; log 256 = 5.5 without learning")
        self.assertIn(line[10:50], done.stdout[done.stdout.index((line * 2)[:64]) + 64 :])

    def test_the_training_script_refuses_a_short_text(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text.txt"
            for size, status in ((0, 2), (256, 2), (257, 0)):
                text.write_text("a" * size)
                command = [sys.executable, EXAMPLES / "train_bytes.py", text, "--steps", "1"]
                done = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual(done.returncode, status, done.stderr)
                if status:
                    self.assertTrue(done.stderr.splitlines()[-1].startswith("train_bytes.py: error: text: got "), done.stderr)
                    self.assertIn(f"got {size} bytes, expected at least 257", done.stderr)

    def test_the_training_script_refuses_a_text_that_is_not_there(self):
        done = subprocess.run([sys.executable, EXAMPLES / "train_bytes.py", "absent.txt"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2, done.stderr)
        last = done.stderr.splitlines()[-1]
        self.assertEqual(last, "train_bytes.py: error: text: [Errno 2] No such file or directory: 'absent.txt', expected a file")


if __name__ == "__main__":
    unittest.main()
