"""Signatures, errors, shapes without values, and the versions: what a caller relies on besides numbers."""

import _ctypes
import functools
import importlib.util
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from typing import get_args

import torch
from support import inputs, state

import efla

# The arguments and defaults of flash-linear-attention 0.6.0; behind the bar what it takes through **kwargs.
SIGNATURES = {
    "chunk_delta_rule": "q k v beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
    "cu_seqlens=None cu_seqlens_cpu=None | chunk_size=64",
    "fused_recurrent_delta_rule": "q k v beta=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False cu_seqlens=None",
    "chunk_gated_delta_rule": "q k v g beta scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False "
    "cu_seqlens=None cu_seqlens_cpu=None chunk_indices=None cp_context=None "
    "| use_gate_in_kernel=False A_log=None dt_bias=None chunk_size=64",
    "fused_recurrent_gated_delta_rule": "q k v g=None gk=None gv=None beta=None scale=None initial_state=None "
    "output_final_state=False use_qk_l2norm_in_kernel=False use_gate_in_kernel=False A_log=None dt_bias=None "
    "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens=None",
    "chunk_kda": "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
    "use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False safe_gate=False lower_bound=None "
    "disable_recompute=False return_intermediate_states=False state_v_first=False cu_seqlens=None cu_seqlens_cpu=None "
    "cp_context=None use_graph=False max_num_seqs=None | A_log=None dt_bias=None chunk_size=64",
    "fused_recurrent_kda": "q k v g beta A_log=None dt_bias=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False "
    "lower_bound=None state_v_first=False cu_seqlens=None",
    "chunk_gdn2": "q k v g b w scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
    "use_gate_in_kernel=False cu_seqlens=None cu_seqlens_cpu=None safe_gate=False lower_bound=None disable_recompute=False "
    "return_intermediate_states=False state_v_first=False cp_context=None "
    "| A_log=None dt_bias=None chunk_size=64 step='euler'",
    "fused_recurrent_gdn2": "q k v g b w A_log=None dt_bias=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False lower_bound=None state_v_first=False cu_seqlens=None "
    "| step='euler'",
    "chunk_comba": "q k v p g beta=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False cu_seqlens=None cu_seqlens_cpu=None | step='euler'",
    "fused_recurrent_comba": "q k p v g beta=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False cu_seqlens=None | step='euler'",
    "chunk_gated_delta_product": "q k v g beta num_householder scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False cu_seqlens=None cu_seqlens_cpu=None cp_context=None | step='euler'",
    "chunk_rwkv7": "r w k v a b scale=1.0 initial_state=None output_final_state=False cu_seqlens=None cu_seqlens_cpu=None "
    "safe_gate=False chunk_size=None disable_recompute=False cp_context=None lower_bound=None | step='euler'",
    "fused_recurrent_rwkv7": "r w k v a b scale=None initial_state=None output_final_state=True cu_seqlens=None | step='euler'",
    "chunk_efla": "q k v beta g=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False "
    "cu_seqlens=None | step='exact' erase_scale=1.0 write_scale=1.0 erase_key=None return_intermediate_states=False "
    "chunk_size=64",
    "fused_recurrent_efla": "q k v beta g=None scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False "
    "cu_seqlens=None | step='exact' erase_scale=1.0 write_scale=1.0 erase_key=None",
    "delta_rule_step": "q k v beta state g=None scale=None use_qk_l2norm_in_kernel=False "
    "| step erase_scale=1.0 write_scale=1.0 erase_key=None",
    "delta_rule_steps": "q k v beta states slots=None g=None scale=None use_qk_l2norm_in_kernel=False "
    "| step erase_scale=1.0 write_scale=1.0 kept=None erase_key=None",
}


def signature_text(function):
    words = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "|" not in words:
            words.append("|")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(parameter.name + default)
    return " ".join(words)


class Contract(unittest.TestCase):
    def test_signatures(self):
        for name, expected in SIGNATURES.items():
            self.assertEqual(signature_text(getattr(efla, name)), expected, name)
        self.assertIs(efla.chunk_gdn, efla.chunk_gated_delta_rule)
        self.assertIs(efla.fused_recurrent_gdn, efla.fused_recurrent_gated_delta_rule)
        self.assertEqual(set(efla.ops.__all__), set(SIGNATURES) | {"chunk_gdn", "fused_recurrent_gdn"})

    def test_one_import_changes(self):
        from efla.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention  # noqa: F401
        from efla.ops.comba import chunk_comba, fused_recurrent_comba  # noqa: F401
        from efla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule  # noqa: F401
        from efla.ops.gated_delta_product import chunk_gated_delta_product  # noqa: F401
        from efla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule  # noqa: F401
        from efla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2  # noqa: F401
        from efla.ops.kda import chunk_kda, fused_recurrent_kda  # noqa: F401
        from efla.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7  # noqa: F401

    def test_every_function_is_documented_and_typed(self):
        for name in efla.ops.__all__:
            function = getattr(efla, name)
            self.assertTrue(function.__doc__, name)
            for parameter in inspect.signature(function).parameters.values():
                self.assertIsNot(parameter.annotation, parameter.empty, f"{name} {parameter.name}")

    def test_the_version_is_that_of_the_project(self):
        for file, version in (("CMakeLists.txt", r"project\(efla VERSION ([0-9.]+)"), ("pyproject.toml", r'\nversion = "([0-9.]+)"')):
            text = (pathlib.Path(__file__).parents[2] / file).read_text(encoding="utf-8")
            self.assertEqual(efla.__version__, re.search(version, text).group(1), file)


class AnotherPyTorch(unittest.TestCase):
    def test_is_refused_before_the_library_is_loaded(self):
        with tempfile.TemporaryDirectory() as folder:
            library = pathlib.Path(folder, "efla_torch.so")
            library.touch()
            library.with_suffix(".version").write_text("0.4.1\n")
            got = subprocess.run(
                [sys.executable, "-c", "import efla"],
                env={**os.environ, "EFLA_TORCH_LIBRARY": str(library)},
                capture_output=True,
                text=True,
            )
        self.assertEqual(got.returncode, 1)
        self.assertIn(f"was built with PyTorch 0.4.1, got {torch.__version__}, expected that one: install efla again", got.stderr)

    @unittest.skipUnless(pathlib.Path("/proc/self/maps").is_file(), "needs Linux")
    def test_is_refused_in_the_same_process(self):
        with tempfile.TemporaryDirectory() as folder:
            second = pathlib.Path(folder, "libc10.so.0")
            shutil.copy(_ctypes.__file__, second)  # any library under the name of PyTorch's
            program = f"import ctypes; ctypes.CDLL({str(second)!r}); import efla"
            got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(got.returncode, 1)
        self.assertRegex(got.stderr, r"ImportError: efla: .* got \S+ and \S+ in one process, expected one")
        self.assertIn(str(second), got.stderr)


class WithoutTransformers(unittest.TestCase):
    def test_what_needs_it_says_so(self):
        for feature, use in (("patch_transformers", "efla.patch_transformers()"), ("efla.hf", "import efla.hf")):
            for transformers, expected in (
                ("None", "is needed: "),
                ("types.SimpleNamespace(__version__='4.57.1')", "is needed, got 4.57.1"),
            ):
                program = f"import efla, sys, types; sys.modules['transformers'] = {transformers}; {use}"
                got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
                self.assertEqual(got.returncode, 1)
                self.assertIn(f"\nImportError: {feature}: transformers 5 {expected}", got.stderr)


class Implementations(unittest.TestCase):
    def test_are_those_of_the_operators_list(self):
        names = torch.ops.efla.delta_rule_implementations()
        self.assertEqual(names[:4], ["auto", "chunk", "recurrent", "ref"])
        self.assertIn("chunk_simd", names)
        x = inputs()
        call = functools.partial(torch.ops.efla.delta_rule, x["q"], x["k"], x["v"], x["beta"])
        expected = call(implementation="ref")[0]
        for name in set(names) - {"chunk_amx", "chunk_cuda", "recurrent_cuda"}:
            torch.testing.assert_close(call(implementation=name)[0], expected, rtol=1e-4, atol=1e-4)
        with self.assertRaisesRegex(RuntimeError, "got 'fast', expected one of " + ", ".join(names)):
            call(implementation="fast")

    def test_choice_is_known_without_a_run(self):
        x = inputs()
        choice = functools.partial(torch.ops.efla.delta_rule_choice, x["q"], x["k"], x["v"])
        self.assertEqual(choice(implementation="chunk_simd"), ("chunk_simd", ""))
        name, reason = choice(implementation="chunk_cuda")
        self.assertEqual(name, "")
        self.assertIn("chunk_cuda: it computes on a GPU, and the tensors are on the CPU", reason)
        halves = [x[letter].half() for letter in ("q", "k", "v")]
        self.assertEqual(torch.ops.efla.delta_rule_choice(*halves), choice())
        with self.assertRaisesRegex(RuntimeError, "k: got dtype Float, expected Half"):
            torch.ops.efla.delta_rule_choice(halves[0], x["k"], x["v"])
        several_steps = torch.ops.efla.delta_rule_choice(x["q"][:, ::2].contiguous(), x["k"], x["v"], implementation="chunk_simd")
        self.assertEqual(several_steps, ("chunk_simd", ""))
        two_keys = choice(erase_key=x["k"], implementation="chunk_amx")
        self.assertEqual(two_keys[0], "")
        with self.assertRaisesRegex(RuntimeError, "erase_key: got dtype Half, expected Float"):
            choice(erase_key=halves[1])


DTYPES = "one of torch.float32, torch.bfloat16, torch.float16, torch.float64"


class Mistakes(unittest.TestCase):
    def refuses(self, message, function, *arguments, **named):
        with self.assertRaises(ValueError) as caught:
            function(*arguments, **named)
        self.assertEqual(str(caught.exception), f"{function.__name__}: {message}")

    def test_steps_of_a_token_that_do_not_fit(self):
        x = inputs(tokens=12, decay="scalar")
        product = {**x, "q": x["q"][:, :4], "g": x["g"][:, :4]}
        f = efla.chunk_gated_delta_product
        self.refuses("num_householder: got 0, expected a whole number of at least 1", f, **product, num_householder=0)
        message = "k: got shape [2, 12, 2, 12], expected [B, T, H, K] = [2, 8, 2, 12]"
        self.refuses(message, f, **product, num_householder=2)
        keys = {name: x["k"] for name in "rwkab"}
        message = "a: got shape [2, 11, 2, 12], expected [B, T, H, K] = [2, 12, 2, 12]"
        self.refuses(message, efla.chunk_rwkv7, **{**keys, "a": x["k"][:, 1:]}, v=x["v"])

    def test_erase_keys(self):
        x = inputs(decay="scalar")
        k = x["k"]
        for bad, message in (
            (k[..., :5], "erase_key: got shape [2, 70, 2, 5], expected shape [2, 70, 2, 12]"),
            (k[0], "erase_key: got shape [70, 2, 12], expected shape [B, T, H, K]"),
            (k.int(), "erase_key: got dtype torch.int32, expected a floating-point dtype"),
            (1.0, "erase_key: got float, expected a tensor"),
        ):
            self.refuses(message, efla.chunk_efla, **x, erase_key=bad)
        self.refuses("v: got NoneType, expected a tensor [B, T, HV, V]", efla.chunk_comba, x["q"], k, None, k, x["g"])
        self.refuses("p: got NoneType, expected a tensor [B, T, H, K]", efla.chunk_comba, x["q"], k, x["v"], None, x["g"])
        odd = (x["v"].repeat(1, 1, 2, 1)[:, :, 1:], k, x["g"].repeat(1, 1, 2)[..., 1:])
        self.refuses("value head count HV: got 3, expected a multiple of H = 2", efla.chunk_comba, x["q"], k, *odd)
        message = "b: got shape [2, 70, 4, 12], expected [B, T, H, K] = [2, 70, 2, 12]"
        self.refuses(message, efla.chunk_gdn2, x["q"], k, x["v"], -k.abs(), k.repeat(1, 1, 2, 1), x["v"])

    def test_tensors(self):
        x = inputs()
        f = efla.chunk_delta_rule
        for name, bad, message in (
            ("q", x["q"][0], "q: got shape [70, 2, 12], expected shape [B, T, H, K]"),
            ("q", None, "q: got NoneType, expected a tensor"),
            ("q", x["q"].int(), f"q: got dtype torch.int32, expected {DTYPES}"),
            ("q", x["q"].half(), "k: got dtype torch.float32, expected torch.float16, as q"),
            ("k", x["k"][..., :5], "k: got shape [2, 70, 2, 5], expected shape [2, 70, 2, 12]"),
            ("k", x["k"].bfloat16(), "k: got dtype torch.bfloat16, expected torch.float32"),
            ("v", x["v"][:, 1:], "v: got shape [2, 69, 2, 10], expected shape [2, 70, 2, 10]"),
            ("v", x["v"].repeat(1, 1, 2, 1)[:, :, 1:], "value head count HV: got 3, expected a multiple of H = 2"),
            ("v", x["v"][..., :0], "value dim V: got 0, expected 1 to 2147483647"),
            ("beta", x["beta"][..., 0], "beta: got shape [2, 70], expected shape [B, T, HV]"),
            ("beta", 1.0, "beta: got float, expected a tensor"),
            ("initial_state", state(3), "initial_state: got shape [3, 2, 12, 10], expected shape [2, 2, 12, 10]"),
        ):
            self.refuses(message, f, **{**x, name: bad})
        for shape in ([0, 2, 12, 10], [2, 2, 12, 0]):
            message = f"initial_state: got shape {shape}, expected shape [2, 2, 12, 10]"
            self.refuses(message, f, **x, initial_state=torch.zeros(shape))
        g = inputs(decay="channel")["g"]
        self.refuses("g: got shape [2, 70, 2, 12], expected a tensor [B, T, HV]", efla.chunk_gated_delta_rule, **x, g=g)
        self.refuses("g: got shape [2, 70, 2], expected a tensor [B, T, HV, K]", efla.chunk_kda, **x, g=g[..., 0])
        self.refuses("g: got shape [2, 70, 1, 12], expected shape [2, 70, 2, 12]", efla.chunk_kda, **x, g=g[:, :, :1])
        self.refuses("g: got NoneType, expected a tensor [B, T, HV, K]", efla.chunk_kda, **x, g=None)
        g = inputs(decay="scalar")["g"]
        for bad in (g[:, :, :1], g[:, 1:], g[:1]):
            message = f"g: got shape {list(bad.shape)}, expected shape [2, 70, 2]"
            self.refuses(message, efla.chunk_gated_delta_rule, **x, g=bad)
            self.refuses(message, efla.chunk_efla, **x, g=bad)

    def test_dtypes_that_a_conversion_would_change(self):
        x = inputs(decay="channel")
        gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(24)}
        for name in ("beta", "g", "initial_state", "A_log", "dt_bias"):
            good = {**x, **gate, "initial_state": state()}
            for dtype in (torch.int64, torch.bool, torch.complex64):
                message = f"{name}: got dtype {dtype}, expected a floating-point dtype"
                self.refuses(message, efla.chunk_kda, **{**good, name: good[name].to(dtype)})
                self.refuses(message, efla.fused_recurrent_kda, **{**good, name: good[name].to(dtype)})
        x = inputs(decay="scalar")
        gate["dt_bias"] = torch.zeros(2)
        for name in ("g", "A_log", "dt_bias"):
            good = {**x, **gate}
            message = f"{name}: got dtype torch.int64, expected a floating-point dtype"
            self.refuses(message, efla.chunk_gated_delta_rule, **{**good, name: good[name].long()})

    def test_tensors_that_are_not_dense(self):
        x = inputs()
        dense = "expected a dense tensor; cu_seqlens packs sequences"
        for name, tensor in x.items():
            message = f"{name}: got a tensor of layout torch.sparse_coo, {dense}"
            self.refuses(message, efla.chunk_efla, **{**x, name: tensor.to_sparse()})
            if hasattr(torch, "jagged"):
                jagged = torch.nested.nested_tensor([*tensor], layout=torch.jagged)
                self.refuses(f"{name}: got a tensor of layout torch.jagged, {dense}", efla.chunk_efla, **{**x, name: jagged})

    def test_packed_sequences(self):
        f, x = efla.chunk_delta_rule, inputs(batch=1)
        cu = torch.tensor
        self.refuses(
            "cu_seqlens[2]: got 40, expected at least cu_seqlens[1] = 50",
            f,
            **x,
            cu_seqlens=cu([0, 50, 40, 70]),
        )
        self.refuses("cu_seqlens[1]: got 69, expected T = 70", f, **x, cu_seqlens=cu([0, 69]))
        self.refuses("cu_seqlens: got shape [1], expected shape [2]", f, **x, cu_seqlens=cu([0]))
        self.refuses(
            "cu_seqlens: got torch.float32, expected torch.int64 or torch.int32", f, **x, cu_seqlens=cu([0.0, 70.0])
        )
        self.refuses(
            "batch size B: got 2, expected 1 with cu_seqlens",
            f,
            **inputs(),
            cu_seqlens=cu([0, 70]),
        )

    def test_choices(self):
        x = inputs()
        f = efla.chunk_efla
        with self.assertRaisesRegex(ValueError, r"^chunk_efla: step: got 'exakt', expected one of euler, .* \(nearest: exact\)$"):
            f(**x, step="exakt")
        self.refuses("step: got 'rk65', expected rk1 to rk64", f, **x, step="rk65")
        for scale in ("inf", "nan"):
            self.refuses(f"scale: got {scale}, expected a finite number", f, **x, scale=float(scale))
        for argument, bad, expected in (
            ("scale", "a", "Optional[float]"),
            ("erase_scale", "a", "float"),
            ("step", 3, "str"),
            ("use_qk_l2norm_in_kernel", "a", "bool"),
        ):
            self.refuses(f"{argument}: got {bad!r}, expected a value of type {expected}", f, **x, **{argument: bad})
        self.refuses("erase_scale: got inf, expected a finite number", f, **x, erase_scale=float("inf"))
        self.refuses(
            "allow_neg_eigval: got True, expected False without use_beta_sigmoid_in_kernel", f, **x, allow_neg_eigval=True
        )
        self.refuses("chunk_size: got 48, expected one of 16, 32, 64", efla.chunk_delta_rule, **x, chunk_size=48)
        x["g"] = inputs(decay="channel")["g"]
        self.refuses("chunk_size: got 16, expected one of 32, 64", efla.chunk_kda, **x, chunk_size=16)
        gate = {"use_gate_in_kernel": True}
        self.refuses("A_log: got NoneType, expected a tensor [HV]", efla.chunk_kda, **x, **gate)
        self.refuses(
            "lower_bound: got -6.0, expected a number in [-5, 0) with safe_gate",
            efla.chunk_kda,
            **x,
            **gate,
            safe_gate=True,
            lower_bound=-6.0,
        )
        for bias, message in ((torch.zeros(5), "shape [5], expected [HV·K] = [24]"), ([0.0] * 24, "list, expected a tensor")):
            self.refuses(f"dt_bias: got {message}", efla.chunk_kda, **x, **gate, A_log=torch.zeros(2), dt_bias=bias)
        for bound in (0.0, 5.0, float("nan"), "x"):
            message = f"lower_bound: got {bound!r}, expected None or a number below 0"
            for function in (efla.chunk_kda, efla.fused_recurrent_kda):
                self.refuses(message, function, **x, **gate, lower_bound=bound)
        learned = {**x, "v": x["v"].clone().requires_grad_()}
        self.refuses(
            "return_intermediate_states: got True with tensors that require gradients, expected torch.no_grad() or "
            "inference_mode()",
            efla.chunk_kda,
            **learned,
            return_intermediate_states=True,
        )
        self.refuses("cp_context: got 1, expected None: this is not implemented", efla.chunk_kda, **x, cp_context=1)
        self.refuses("use_graph: got True, expected False: this is not implemented", efla.chunk_kda, **x, use_graph=True)
        x["g"] = x["g"][..., 0]
        message = "gv: got a tensor of shape [2, 70, 2, 10], expected None: this is not implemented"
        self.refuses(message, efla.fused_recurrent_gated_delta_rule, **x, gv=x["v"])

    def test_one_token(self):
        x = {name: tensor[:, 0] for name, tensor in inputs().items()}
        f = functools.partial(efla.delta_rule_step, step="exact")
        f.__name__ = "delta_rule_step"
        with self.assertRaisesRegex(TypeError, "step"):  # none is every model's
            efla.delta_rule_step(**x, state=state())
        self.refuses("state: got dtype torch.float64, expected torch.float32", f, **x, state=state().double())
        self.refuses("state: got shape [1, 2, 12, 10], expected shape [2, 2, 12, 10]", f, **x, state=state(1))
        self.refuses("g: got shape [2, 1], expected shape [2, 2]", f, **x, state=state(), g=torch.zeros(2, 1))
        self.refuses("scale: got 'a', expected a value of type Optional[float]", f, **x, state=state(), scale="a")
        shared = "a tensor whose elements share memory, as expand() makes it, expected one that can be written, as clone() makes it"
        self.refuses(f"state: got {shared}", f, **x, state=state(1).expand(2, 2, 12, 10))
        self.refuses("beta: got dtype torch.int64, expected a floating-point dtype", f, **{**x, "beta": x["beta"].long()}, state=state())
        for name, tensor in {**x, "state": state()}.items():
            learned = {**x, "state": state(), name: tensor.clone().requires_grad_()}
            message = f"{name}: got a tensor that requires gradients, expected torch.no_grad(): this function has none"
            self.refuses(message, f, **learned)
            with torch.no_grad():
                self.assertFalse(f(**learned).requires_grad)
        x["q"] = x["q"].unsqueeze(1)
        self.refuses("q: got shape [2, 1, 2, 12], expected shape [B, H, K]", f, **x, state=state())

    def test_tokens_of_a_pool(self):
        x = inputs(tokens=3)
        f = functools.partial(efla.delta_rule_steps, step="exact")
        f.__name__ = "delta_rule_steps"
        pool, slots = state(5), torch.tensor([4, -1])
        self.refuses("states: got dtype torch.float64, expected torch.float32", f, **x, states=pool.double(), slots=slots)
        self.refuses("states: got shape [5, 2, 12, 10], expected shape [2, 2, 12, 10]", f, **x, states=pool)
        self.refuses("slots: got shape [1], expected shape [2]", f, **x, states=pool, slots=slots[:1])
        self.refuses("slots: got dtype torch.int32, expected torch.int64", f, **x, states=pool, slots=slots.int())
        for name in ("slots", "kept"):
            self.refuses(f"{name}: got shape [0], expected shape [2]", f, **x, states=state(), **{name: slots[:0]})
        shared = "a tensor whose elements share memory, as expand() makes it, expected one that can be written, as clone() makes it"
        self.refuses(f"states: got {shared}", f, **x, states=state(1).expand(2, 2, 12, 10))
        learned = {**x, "v": x["v"].clone().requires_grad_()}
        message = "v: got a tensor that requires gradients, expected torch.no_grad(): this function has none"
        self.refuses(message, f, **learned, states=state())
        g = torch.zeros(2, 2, 2)
        self.refuses("g: got shape [2, 2, 2], expected shape [2, 3, 2]", f, **x, states=pool, slots=slots, g=g)
        for bad, index in (([4, 4], 1), ([5, 0], 0), ([-2, 0], 0)):
            expected = f"slots[{index}]: got {bad[index]}, expected -1 or a state of 5 that no other entry has"
            self.refuses(expected, f, **x, states=pool, slots=torch.tensor(bad))


class Derivatives(unittest.TestCase):
    def test_of_second_order_are_refused(self):
        x = inputs(tokens=3, dtype=torch.float64)
        x["q"].requires_grad_()
        o, _ = efla.chunk_delta_rule(**x)
        with self.assertRaisesRegex(RuntimeError, "create_graph: got true, expected false: only first derivatives are implemented"):
            torch.autograd.grad(o.sum(), x["q"], create_graph=True)


    def test_of_a_state_that_a_step_has_overwritten_are_refused(self):
        x = inputs(tokens=1)
        for step, tokens in ((efla.delta_rule_step, {n: t[:, 0] for n, t in x.items()}), (efla.delta_rule_steps, x)):
            s, weight = state(), torch.ones(2, 2, 12, 10, requires_grad=True)
            loss = (weight * s).sum()
            step(*tokens.values(), s, step="exact")
            self.assertEqual(s._version, 1)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()
        with torch.inference_mode():
            s = state()
            efla.delta_rule_steps(*x.values(), s, step="exact")
        efla.delta_rule_steps(*x.values(), s, step="exact")


class Types(unittest.TestCase):
    def test_choices_are_those_of_the_code(self):
        from efla._choices import RuleName, Step
        from efla.layers import RULES

        self.assertEqual(get_args(RuleName), tuple(RULES))
        x = inputs(tokens=3)
        for step in get_args(Step):
            efla.chunk_efla(**x, step=step)

    @unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed")
    def test_a_word_that_is_not_a_choice(self):
        got = self.mypy("""
            import efla, torch
            x = torch.ones(1, 3, 2, 4)
            efla.chunk_efla(x, x, x, x[..., 0], step="rk4")
            efla.chunk_efla(x, x, x, x[..., 0], step="rk65")
            efla.layers.DeltaNet(mode="chunked")
        """)
        self.assertIn("program.py:5: error:", got.stdout)
        self.assertIn("program.py:6: error:", got.stdout)
        self.assertNotIn("program.py:4: error:", got.stdout)

    @unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed")
    def test_results_unpack(self):
        got = self.mypy("""
            import efla, torch
            x = torch.ones(1, 3, 2, 4)
            b = torch.ones(1, 3, 2)
            o, state = efla.chunk_efla(x, x, x, b, output_final_state=True)
            o, state = efla.chunk_kda(x, x, x, x, b)
            o, state, between = efla.chunk_kda(x, x, x, x, b, return_intermediate_states=True)
            o, state = efla.chunk_gated_delta_rule(x, x, x, b, b)
            o = efla.delta_rule_step(x[0], x[0], x[0], b[0], x, step="exact")
            between.sum()
        """)
        self.assertEqual(got.returncode, 0, got.stdout + got.stderr)

    def mypy(self, program):
        """Checks the text of a program, which uses the package."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "program.py")
            file.write_text(textwrap.dedent(program))
            package = pathlib.Path(efla.__file__).parents[1]
            return subprocess.run(
                [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", folder, str(file)],
                env={**os.environ, "MYPYPATH": "" if "site-packages" in package.parts else str(package)},
                capture_output=True,
                text=True,
            )

    @unittest.skipUnless(all(map(importlib.util.find_spec, ("mypy", "transformers", "fla"))), "mypy, transformers or fla is not installed")
    def test_package_is_strict(self):
        # Keeps mypy's cache, because without one mypy reads PyTorch and transformers for minutes.
        got = subprocess.run([sys.executable, "-m", "mypy"], cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True)
        self.assertEqual(got.returncode, 0, got.stdout + got.stderr)


class WithoutValues(unittest.TestCase):
    """Tensors on the device meta have shapes and dtypes only: what torch.compile traces with."""

    def test_shapes_and_gradients(self):
        packed = torch.tensor([0, 5, 40, 70])
        for function, decay in (
            (efla.chunk_delta_rule, None),
            (efla.chunk_gated_delta_rule, "scalar"),
            (efla.fused_recurrent_kda, "channel"),
            (efla.chunk_efla, "channel"),
        ):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for cu_seqlens in (None, packed):
                    x = inputs(batch=1 if cu_seqlens is not None else 2, decay=decay, value_heads=4, dtype=dtype)
                    s = state(sequences=3 if cu_seqlens is not None else 2, value_heads=4)
                    x = {name: tensor.to("meta").requires_grad_() for name, tensor in {**x, "initial_state": s}.items()}
                    cu = None if cu_seqlens is None else cu_seqlens.to("meta")
                    o, final = function(**x, output_final_state=True, cu_seqlens=cu)
                    self.assertEqual((o.shape, o.dtype, o.device.type), (x["v"].shape, dtype, "meta"))
                    self.assertEqual((final.shape, final.dtype), (s.shape, torch.float32))
                    (o.sum() + final.sum()).backward()
                    for tensor in x.values():
                        self.assertEqual((tensor.grad.shape, tensor.grad.dtype), (tensor.shape, tensor.dtype))

    def test_one_token(self):
        x = {name: tensor[:, 0].to("meta") for name, tensor in inputs(decay="channel", value_heads=4).items()}
        o = efla.delta_rule_step(**x, state=state(value_heads=4).to("meta"), step="exact")
        self.assertEqual((o.shape, o.dtype, o.device.type), (x["v"].shape, torch.float32, "meta"))

    def test_wrong_shapes(self):
        x = {name: tensor.to("meta") for name, tensor in inputs(decay="channel", value_heads=4).items()}
        s = state(value_heads=4).to("meta")
        with self.assertRaisesRegex(ValueError, r"chunk_kda: k: got shape \[2, 69, 2, 12\], expected shape \[2, 70, 2, 12\]"):
            efla.chunk_kda(**{**x, "k": x["k"][:, 1:]})
        with self.assertRaisesRegex(ValueError, r"beta: got shape \[1, 70, 4\], expected shape \[2, 70, 4\]"):
            efla.chunk_kda(**{**x, "beta": x["beta"][:1]})
        with self.assertRaisesRegex(ValueError, r"initial_state: got shape \[1, 4, 12, 10\], expected shape \[2, 4, 12, 10\]"):
            efla.chunk_kda(**x, initial_state=s[:1])
        with self.assertRaisesRegex(ValueError, "HV: got 3, expected a multiple of H = 2"):
            efla.chunk_delta_rule(x["q"], x["k"], x["v"][:, :, :3], x["beta"][:, :, :3])
        one = {name: tensor[:, 0] for name, tensor in x.items()}
        with self.assertRaisesRegex(ValueError, r"delta_rule_step: state: got shape \[1, 4, 12, 10\]"):
            efla.delta_rule_step(**one, state=s[:1], step="exact")

    def test_all_tensors_or_none(self):
        x = {**inputs(decay="channel", value_heads=4), "initial_state": state(value_heads=4)}
        for name in x:
            with self.assertRaisesRegex(ValueError, "chunk_efla: .*: got a tensor on (cpu|meta), expected one on"):
                efla.chunk_efla(**{**x, name: x[name].to("meta")})
        one = {name: tensor[:, 0] for name, tensor in x.items() if name != "initial_state"}
        few = {name: tensor[:, :2] for name, tensor in x.items() if name != "initial_state"}
        for name in one:
            with self.assertRaisesRegex(ValueError, "delta_rule_step: .*: got a tensor on (cpu|meta), expected one on"):
                efla.delta_rule_step(**{**one, name: one[name].to("meta")}, state=x["initial_state"], step="exact")
            with self.assertRaisesRegex(ValueError, "delta_rule_steps: .*: got a tensor on (cpu|meta), expected one on"):
                efla.delta_rule_steps(**{**few, name: few[name].to("meta")}, states=x["initial_state"], step="exact")


if __name__ == "__main__":
    unittest.main()
