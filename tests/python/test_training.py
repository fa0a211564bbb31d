"""PyTorch's ways of training: torch.func, activation checkpointing, autocast, FSDP2, the checks of torch.library."""

import copy
import os
import tempfile
import unittest
import warnings

import torch
from support import assert_close, inputs, state
from torch.utils.checkpoint import checkpoint

import efla
from efla.layers import EFLA, GatedDeltaNet, KimiDeltaAttention

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LAYERS = (
    lambda: EFLA(hidden_size=24, num_heads=2),
    lambda: GatedDeltaNet(hidden_size=24, head_dim=8, num_heads=2, num_v_heads=4),
    lambda: KimiDeltaAttention(hidden_size=24, head_dim=8, num_heads=2),
)


def sharded(rank, folder):
    """Trains each layer for three steps with FSDP2 on two processes, and checks what one process learns from both batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for made in LAYERS:
        torch.manual_seed(3)
        whole = made()
        x = torch.randn(3, 2, 20, 24)  # steps, sequences
        layer = fully_shard(copy.deepcopy(whole), mesh=mesh)
        for model, batch in ((whole, x), (layer, x[:, rank : rank + 1])):
            optimiser = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                optimiser.zero_grad()
                model(batch[step])[0].square().mean().backward()
                optimiser.step()
        for (name, expected), parameter in zip(whole.named_parameters(), layer.parameters()):
            torch.testing.assert_close(parameter.full_tensor(), expected.data, rtol=1e-4, atol=1e-5, msg=name)
    torch.distributed.destroy_process_group()
    os._exit(0)  # because Gloo's threads may still release tensors, which aborts a Python that is ending


class Training(unittest.TestCase):
    def test_activation_checkpointing(self):
        for device in DEVICES:
            for made in LAYERS:
                layer, gradients = made().to(device), []
                x = torch.randn(2, 40, 24, device=device)
                for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
                    layer.zero_grad()
                    run(x)[0].square().sum().backward()
                    gradients.append([p.grad.clone() for p in layer.parameters()])
                for got, expected in zip(*gradients):
                    torch.testing.assert_close(got, expected)

    def test_autocast(self):
        for device in DEVICES:
            for made in LAYERS:
                layer = made().to(device)
                x = torch.randn(2, 40, 24, device=device)
                expected = layer(x)[0]
                with torch.autocast(device, torch.bfloat16):
                    got = layer(x)[0]
                self.assertEqual(got.dtype, torch.bfloat16)
                assert_close(self, got, expected, torch.bfloat16, factor=3)
                got.float().square().sum().backward()
                for parameter in layer.parameters():
                    self.assertEqual(parameter.grad.dtype, torch.float32)

    @unittest.skipUnless(hasattr(torch, "func"), "torch.func came with PyTorch 2")
    def test_torch_func(self):
        def loss(function, x):
            o, final = function(**x, output_final_state=True)
            return o.sin().sum() + final.square().sum()

        warnings.simplefilter("ignore")  # that vmap runs the operator once for each entry
        for device in DEVICES:
            for function, decay in (
                (efla.chunk_efla, None),
                (efla.chunk_gated_delta_rule, "scalar"),
                (efla.fused_recurrent_kda, "channel"),
            ):
                x = {**inputs(tokens=40, decay=decay), "initial_state": state()}
                if function is efla.chunk_efla and device == "cpu":
                    x["erase_key"] = 0.5 * x["k"]
                x = {name: tensor.to(device) for name, tensor in x.items()}
                leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
                loss(function, leaves).backward()
                got = torch.func.grad(lambda x: loss(function, x))(x)
                for name, leaf in leaves.items():
                    assert_close(self, got[name], leaf.grad, what=f"{function.__name__} d{name}")
                some = torch.func.grad(lambda v: function(**{**x, "v": v})[0].sum())(x["v"])  # of one input and output
                self.assertTrue(torch.isfinite(some).all())
                each = torch.func.vmap(torch.func.grad(lambda x: loss(function, x)))({n: t[:, None] for n, t in x.items()})
                for name, leaf in leaves.items():
                    assert_close(self, each[name][:, 0], leaf.grad, what=f"{function.__name__} d{name} of each")

    @unittest.skipUnless(hasattr(torch, "func"), "torch.func came with PyTorch 2")
    def test_torch_func_refuses_second_and_forward_derivatives(self):
        x = inputs(tokens=3)
        q = x.pop("q")

        def loss(q):
            return efla.chunk_delta_rule(q, **x)[0].square().sum()

        for transformed in (torch.func.hessian(loss), lambda q: torch.func.jvp(loss, (q,), (q,))):
            with self.assertRaisesRegex(NotImplementedError, r"^chunk_delta_rule: got a forward derivative \(jvp"):
                transformed(q)
        with torch.autograd.forward_ad.dual_level():
            with self.assertRaisesRegex(NotImplementedError, r"^chunk_delta_rule: got a forward derivative \(jvp"):
                loss(torch.autograd.forward_ad.make_dual(q, q))
        x1 = {name: tensor[:, 0] for name, tensor in x.items()}
        with self.assertRaisesRegex(ValueError, "^delta_rule_step: q: got a tensor that requires gradients"):
            torch.func.grad(lambda q: efla.delta_rule_step(q[:, 0], **x1, state=state(), step="exact").sum())(q)
        for transformed in (
            torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum()),
            torch.func.jacrev(torch.func.jacrev(loss)),
        ):
            with self.assertRaisesRegex(RuntimeError, "derivative for efla::delta_rule_bwd is not implemented"):
                transformed(q)
        got = torch.func.vmap(lambda q: efla.chunk_delta_rule(q, **x)[0])(torch.stack([q, 2 * q]))
        torch.testing.assert_close(got[1], 2 * got[0])

    @unittest.skipUnless(hasattr(torch.library, "opcheck"), "torch.library.opcheck came with PyTorch 2.4")
    def test_opcheck(self):
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
        for device in DEVICES:
            for decay in (None, "scalar", "channel"):
                x = {**inputs(tokens=40, decay=decay), "initial_state": state()}
                x = {name: tensor.to(device).requires_grad_() for name, tensor in x.items()}
                torch.library.opcheck(torch.ops.efla.delta_rule, (), x, test_utils=tests)
            x = {name: tensor[:, 0].to(device) for name, tensor in inputs(2, decay="scalar").items()}
            torch.library.opcheck(torch.ops.efla.delta_rule_step, (), {**x, "state": state().to(device)}, test_utils=tests)
            x = {name: tensor.to(device) for name, tensor in inputs(2, decay="scalar").items()}
            torch.library.opcheck(torch.ops.efla.delta_rule_steps, (), {**x, "states": state().to(device)}, test_utils=tests)
            kept = torch.tensor([1, 0], device=device)
            torch.library.opcheck(torch.ops.efla.delta_rule_steps, (), {**x, "states": state().to(device), "kept": kept}, test_utils=tests)

    @unittest.skipUnless(hasattr(torch, "compile"), "FSDP2 came with PyTorch 2.6")
    def test_fsdp2(self):
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError:
            self.skipTest("FSDP2 came with PyTorch 2.6")
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(sharded, (folder,), nprocs=2)


if __name__ == "__main__":
    unittest.main()
