"""The operators compute with as many threads as PyTorch, and their results do not depend on the number; Linux only."""

import os
import pathlib
import subprocess
import sys
import textwrap
import unittest

import torch
from support import inputs

import efla

TASKS = pathlib.Path("/proc/self/task")
# Small tensors, for which PyTorch itself starts no threads. Prints the threads of the process after each number that is set.
PROGRAM = textwrap.dedent("""
    import os, sys, torch, efla
    x = torch.rand(1, 70, 4, 8).requires_grad_()
    for number in sys.argv[1:]:
        if number != "none":
            torch.set_num_threads(int(number))
        before = len(os.listdir("/proc/self/task"))
        efla.chunk_delta_rule(x, x, x, x[..., 0])[0].sum().backward()
        print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
""")


@unittest.skipUnless(TASKS.is_dir(), "needs Linux")
class Threads(unittest.TestCase):
    def started(self, *numbers, **environment):
        """Returns the number of threads that a call starts after each torch.set_num_threads, and PyTorch's number of threads."""
        environment = {**os.environ, **environment}
        got = subprocess.run([sys.executable, "-c", PROGRAM, *numbers], env=environment, capture_output=True, text=True)
        self.assertEqual(got.returncode, 0, got.stderr)
        return [tuple(map(int, line.split())) for line in got.stdout.splitlines()]

    def test_are_those_of_set_num_threads(self):
        self.assertEqual(self.started("1", "3", "1", "3"), [(0, 1), (2, 3), (0, 1), (0, 3)])

    def test_are_those_of_the_environment(self):
        self.assertEqual(self.started("none", OMP_NUM_THREADS="1"), [(0, 1)])
        ((started, threads),) = self.started("none", OMP_NUM_THREADS="4")
        self.assertEqual(started, threads - 1)

    def test_do_not_change_results(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        for decay in (None, "scalar", "channel"):
            for heads in (1, 4):
                runs = []
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    x = {n: t.requires_grad_() for n, t in inputs(tokens=150, heads=heads, decay=decay).items()}
                    o = efla.chunk_efla(**x)[0]
                    runs.append([o, *torch.autograd.grad(o.square().sum(), list(x.values()))])
                for run in runs[1:]:
                    self.assertTrue(all(torch.equal(a, b) for a, b in zip(run, runs[0])), f"{decay} {heads}")


if __name__ == "__main__":
    unittest.main()
