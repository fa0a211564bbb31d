"""Tensors on a GPU: the numbers of the CPU's reference, the current stream, and reasons instead of silent copies."""

import copy
import unittest
from unittest import mock

import torch
from support import assert_close, inputs, state

import efla


def to(device, tensors):
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def on_gpu(tensors):
    return to("cuda", tensors)


def with_erase_key(tensors):
    """The tensors with an erase key, a part between 0 and 1 of every element of k."""
    return {**tensors, "erase_key": (torch.rand(tensors["k"].shape) * tensors["k"].float()).to(tensors["k"].dtype)}


@unittest.skipUnless(torch.cuda.is_available(), "no GPU that this PyTorch can use")
class Cuda(unittest.TestCase):
    def compare(self, function, x, **named):
        """Runs the function on the GPU and, in float64, on the CPU."""
        exact = {name: tensor.double() for name, tensor in x.items()}
        expected_o, expected_state = function(**exact, output_final_state=True, **named)
        o, state = function(**on_gpu(x), output_final_state=True, **named)
        self.assertEqual((o.device.type, o.dtype), ("cuda", x["q"].dtype))
        self.assertEqual((state.device.type, state.dtype), ("cuda", torch.float32))
        assert_close(self, o.cpu(), expected_o, x["q"].dtype, what=function.__name__)
        assert_close(self, state.cpu(), expected_state, x["q"].dtype, what=function.__name__)

    def test_forward_agrees_with_the_reference(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = {name: inputs()[name].to(dtype) for name in ("q", "k", "v", "beta")}
            self.compare(efla.chunk_efla, x)
            self.compare(efla.fused_recurrent_efla, x)
            self.compare(efla.chunk_efla, with_erase_key(x))
            self.compare(efla.chunk_delta_rule, x, use_qk_l2norm_in_kernel=True)
            g = -torch.rand(x["beta"].shape)
            self.compare(efla.chunk_gated_delta_rule, {**x, "g": g}, use_qk_l2norm_in_kernel=True)

    def product(self, dtype, n=3, decay="scalar"):
        """Tensors of DeltaProduct with n steps for each of 20 tokens."""
        x = inputs(tokens=20 * n, key_dim=64, value_dim=64, decay=decay, dtype=dtype)
        return {name: tensor[:, :20] if name in ("q", "g") else tensor for name, tensor in x.items()}

    def two_keys(self, dtype):
        """Each function with two keys, and its tensors."""
        x = inputs(key_dim=64, value_dim=64, decay="scalar", dtype=dtype)
        b, w = torch.rand(x["k"].shape).to(dtype), torch.rand(x["v"].shape).to(dtype)
        channel = inputs(key_dim=64, value_dim=64, decay="channel", dtype=dtype)
        gdn2 = {**{name: channel[name] for name in ("q", "k", "v", "g")}, "b": b, "w": w}
        removal = torch.nn.functional.normalize(x["q"].float(), dim=-1).to(dtype)
        rwkv7 = {"r": x["q"], "w": -0.61 * torch.rand(x["k"].shape), "k": x["k"], "v": x["v"], "a": -removal, "b": removal * b}
        return (
            (efla.chunk_comba, {**x, "p": 0.7 * x["k"]}, {"use_qk_l2norm_in_kernel": True}),
            (efla.chunk_gdn2, gdn2, {"use_qk_l2norm_in_kernel": True}),
            (efla.chunk_rwkv7, rwkv7, {}),
            (efla.chunk_gated_delta_product, self.product(dtype), {"num_householder": 3, "use_qk_l2norm_in_kernel": True}),
        )

    def test_rules_with_two_keys_or_several_steps_agree_with_the_reference(self):
        for dtype in (torch.float32, torch.bfloat16):
            for function, x, named in self.two_keys(dtype):
                results = []
                for device in ("cpu", "cuda"):
                    leaves = {n: t.detach().double() if device == "cpu" else t.detach().cuda() for n, t in x.items()}
                    leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
                    o, state = function(**leaves, output_final_state=True, **named)
                    (o.to(state.dtype).square().sum() + state.square().sum()).backward()
                    results.append({"o": o, "state": state} | {f"d{name}": leaf.grad for name, leaf in leaves.items()})
                for name, expected in results[0].items():
                    what = f"{function.__name__} {name} {dtype}"
                    assert_close(self, results[1][name].detach().cpu(), expected.detach(), dtype, factor=4, what=what)

    def test_steps_of_a_token_are_tokens_on_a_gpu(self):
        x = on_gpu(self.product(torch.bfloat16, n=2, decay=None))
        ends = torch.tensor([0, 14, 40]).cuda()
        one = {name: tensor[:1] for name, tensor in x.items()}
        packed, _ = torch.ops.efla.delta_rule(*one.values(), cu_seqlens=ends, step="euler")
        alone = [{name: tensor[:, :7] if name == "q" else tensor[:, :14] for name, tensor in one.items()}]
        expected, _ = torch.ops.efla.delta_rule(*alone[0].values(), step="euler")
        self.assertEqual(packed.shape[1], 20)
        self.assertTrue(torch.equal(packed[:, :7], expected))
        with self.assertRaisesRegex(RuntimeError, "several steps per token"):
            states = torch.zeros(2, 2, 64, 64).cuda()
            torch.ops.efla.delta_rule_steps(x["q"][:, :2], x["k"][:, :4], x["v"][:, :4], x["beta"][:, :4], None, states)

    def test_gradients_agree_with_the_reference(self):
        for decay in (None, "scalar", "channel"):
            x = inputs(decay=decay)
            gradients = []
            for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
                leaves = {name: tensor.clone().to(device, dtype).requires_grad_() for name, tensor in x.items()}
                o, state = efla.chunk_efla(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
                (o.square().sum() + state.square().sum()).backward()
                gradients.append({name: leaf.grad for name, leaf in leaves.items()})
            for name, expected in gradients[0].items():
                assert_close(self, gradients[1][name].cpu(), expected, factor=2, what=f"d{name}, decay {decay}")

    def test_choice_knows_the_kernels(self):
        for dtype, key_dim, decay, named in (
            (torch.bfloat16, 128, "channel", "chunk_cuda"),
            (torch.bfloat16, 192, "channel", ""),
            (torch.bfloat16, 190, None, ""),
            (torch.float32, 128, None, "chunk_cuda"),
            (torch.float32, 64, "channel", "chunk_cuda"),
            (torch.float32, 192, None, ""),
            (torch.float16, 128, "scalar", "chunk_cuda"),
            (torch.float16, 256, None, "chunk_cuda"),
            (torch.float16, 128, "channel", "chunk_cuda"),
        ):
            x = on_gpu(inputs(key_dim=key_dim, value_dim=64, decay=decay, dtype=dtype))
            arguments = x["q"], x["k"], x["v"], x.get("g"), None
            with self.subTest(dtype=dtype, key_dim=key_dim, decay=decay):
                self.assertEqual(torch.ops.efla.delta_rule_choice(*arguments, "chunk")[0], named)
                self.assertEqual(torch.ops.efla.delta_rule_choice(*arguments)[0], named or "recurrent_cuda")
                if named and key_dim <= 128:
                    two_keys = torch.ops.efla.delta_rule_choice(*arguments, "chunk", x["k"])
                    self.assertEqual(two_keys[0], "chunk_cuda")

    def check_gradients(self, dtype, decay, add_keys=dict):
        gradients = []
        tensors = add_keys(inputs(key_dim=64, value_dim=64, decay=decay, dtype=dtype))
        for device in ("cpu", "cuda"):
            x = {n: t.double() if device == "cpu" else t.cuda() for n, t in tensors.items()}
            leaves = {name: tensor.requires_grad_() for name, tensor in x.items()}
            o, state = efla.chunk_efla(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
            (o.to(state.dtype).sum() + state.sum()).backward()
            gradients.append({name: leaf.grad for name, leaf in leaves.items()})
        for name, expected in gradients[0].items():
            assert_close(self, gradients[1][name].cpu(), expected, dtype, factor=2, what=f"d{name}, {decay}, {dtype}")

    def test_gradients_in_16_bits_agree_with_the_reference(self):
        for dtype in (torch.bfloat16, torch.float16):
            for decay in (None, "scalar", "channel"):
                self.check_gradients(dtype, decay)

    def test_gradients_with_two_keys_agree_with_the_reference(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for decay in (None, "scalar", "channel"):
                self.check_gradients(dtype, decay, with_erase_key)

    def test_layouts_do_not_change_results(self):
        x = on_gpu({name: tensor.bfloat16() for name, tensor in inputs(tokens=200, key_dim=64, value_dim=64).items()})
        results = []
        for axis in (3, 1):  # of the elements side by side in memory: columns, and tokens as after a convolution
            leaves = {n: t.transpose(axis, -1).contiguous().transpose(axis, -1) if t.dim() == 4 else t for n, t in x.items()}
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
            o, state = efla.chunk_efla(**leaves, output_final_state=True)
            o.backward(torch.ones_like(o).transpose(axis, -1).contiguous().transpose(axis, -1))
            results.append({"o": o, "state": state} | {f"d{name}": leaf.grad for name, leaf in leaves.items()})
        for name, expected in results[0].items():
            self.assertTrue(torch.equal(results[1][name], expected), name)

    def test_float16_is_not_converted(self):
        x = on_gpu(inputs(key_dim=64, value_dim=64, decay="scalar", dtype=torch.float16))
        with mock.patch.object(torch.ops.efla, "delta_rule", side_effect=torch.ops.efla.delta_rule) as operator:
            efla.chunk_efla(**x)
        self.assertEqual({operator.call_args.args[i].dtype for i in range(4)}, {torch.float16})

    def test_steps_are_the_forward(self):
        for add_keys in (dict, with_erase_key):
            x = on_gpu(add_keys(inputs(tokens=4, decay="scalar")))
            expected, expected_state = efla.chunk_efla(**x, output_final_state=True)
            state = torch.zeros_like(expected_state)
            steps = [efla.delta_rule_step(**{n: t[:, i] for n, t in x.items()}, state=state, step="exact") for i in range(4)]
            o = torch.stack(steps, dim=1)
            assert_close(self, o.cpu(), expected.cpu(), what="o")
            assert_close(self, state.cpu(), expected_state.cpu(), what="state")

    def test_tokens_of_a_pool_agree_with_the_cpu(self):
        for state_dtype in (torch.float32, torch.bfloat16):
            x = inputs(tokens=5, decay="scalar")
            pool, slots = torch.randn(4, x["v"].shape[2], x["k"].shape[3], x["v"].shape[3]).to(state_dtype), [3, -1]
            expected_pool, got_pool = pool.clone(), pool.cuda()
            expected = efla.delta_rule_steps(**x, states=expected_pool, slots=torch.tensor(slots), step="exact")
            got = efla.delta_rule_steps(**on_gpu(x), states=got_pool, slots=torch.tensor(slots).cuda(), step="exact")
            assert_close(self, got.cpu(), expected, state_dtype, factor=4, what="o")
            assert_close(self, got_pool.cpu(), expected_pool, state_dtype, factor=4, what="states")

    def test_tokens_that_are_not_kept_are_rolled_back(self):
        x = on_gpu(inputs(tokens=5, decay="scalar"))
        pool = torch.randn(2, x["v"].shape[2], x["k"].shape[3], x["v"].shape[3]).cuda()
        first = pool[:1].clone()
        efla.delta_rule_steps(**{name: tensor[:1, :3] for name, tensor in x.items()}, states=first, step="exact")
        untouched = pool[1].clone()
        efla.delta_rule_steps(**x, states=pool, step="exact", kept=torch.tensor([3, 0]).cuda())
        self.assertTrue(torch.equal(pool[:1], first) and torch.equal(pool[1], untouched))

    def test_layers_agree_with_the_cpu(self):
        torch.manual_seed(0)
        x = torch.randn(2, 70, 64)
        made = [make(hidden_size=64, num_heads=4) for make in (efla.layers.EFLA, efla.layers.DeltaNet)]
        gated = (efla.layers.GatedDeltaNet, efla.layers.GatedDeltaProduct, efla.layers.KimiDeltaAttention)
        made += [make(hidden_size=64, head_dim=16, num_heads=4) for make in gated]
        for layer in made:
            layer.requires_grad_(False)
            expected = layer(x)[0]
            y = layer.cuda()(x.cuda())[0]
            self.assertEqual(y.device.type, "cuda")
            assert_close(self, y.cpu(), expected, factor=4, what=type(layer).__name__)

    def test_gradients_of_convolution_and_norm(self):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            x, dy = torch.randn(2, 70, 96).to(dtype), torch.randn(2, 70, 96).to(dtype)
            taps, weight = torch.randn(96, 4), torch.randn(96)
            for op, parameter in ((torch.ops.efla.short_conv, taps), (torch.ops.efla.rms_norm, weight)):
                results = []
                for device in ("cpu", "cuda"):
                    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (x, parameter)]
                    y = op(*leaves)
                    y.backward(dy.to(device))
                    results.append([y] + [leaf.grad for leaf in leaves])
                for expected, got in zip(*results):
                    assert_close(self, got.cpu(), expected.detach(), dtype, what=str(op))

    def test_gradients_of_the_gated_norm(self):
        for dtype in (torch.float32, torch.bfloat16):
            for activation in ("silu", "sigmoid"):
                torch.manual_seed(0)
                x, gate, dy = (torch.randn(2, 70, 96).to(dtype) for _ in range(3))
                results = []
                for device in ("cpu", "cuda"):
                    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (x, gate, torch.ones(96))]
                    y = torch.ops.efla.gated_rms_norm(*leaves, activation)
                    y.backward(dy.to(device))
                    results.append([y] + [leaf.grad for leaf in leaves])
                for expected, got in zip(*results):
                    assert_close(self, got.cpu(), expected.detach(), dtype, what=activation)

    def test_runs_on_the_current_stream(self):
        x = on_gpu({name: inputs()[name] for name in ("q", "k", "v", "beta")})
        expected, _ = efla.chunk_efla(**x)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            o, _ = efla.chunk_efla(**x)
            self.assertFalse(stream.query(), "the call waited for the stream")
        stream.synchronize()
        self.assertTrue(torch.equal(o, expected))

    def test_is_captured_in_a_graph(self):
        x = on_gpu({name: inputs()[name].bfloat16() for name in ("q", "k", "v", "beta")})
        expected, _ = efla.chunk_efla(**x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = efla.chunk_efla(**x)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(o, expected))

    def test_says_what_it_does_not_take(self):
        x = {name: inputs()[name] for name in ("q", "k", "v", "beta")}
        with self.assertRaisesRegex(ValueError, "k: got a tensor on cpu, expected one on cuda:0"):
            efla.chunk_efla(**{**x, "q": x["q"].cuda()})
        with self.assertRaisesRegex(ValueError, "beta: got a tensor on cpu, expected one on cuda:0"):
            efla.chunk_efla(**{**on_gpu(x), "beta": x["beta"]})
        with self.assertRaisesRegex(ValueError, "ref: it computes on the CPU, and the tensors are on cuda:0"):
            efla.chunk_efla(**{name: tensor.double() for name, tensor in on_gpu(x).items()})


@unittest.skipUnless(torch.cuda.device_count() >= 2, "fewer than two GPUs that this PyTorch can use")
class SecondGpu(unittest.TestCase):
    """Tensors on cuda:1 while cuda:0 is the current device."""

    def setUp(self):
        self.assertEqual(torch.cuda.current_device(), 0)

    def functions(self, device, dtype, decay):
        """Returns what functions compute on a device, with their gradients and steps, by name."""
        x = to(device, {**inputs(key_dim=64, value_dim=64, decay=decay, dtype=dtype), "initial_state": state(key_dim=64, value_dim=64)})
        leaves, results = {name: tensor.requires_grad_() for name, tensor in x.items()}, {}
        for function in (efla.chunk_efla, efla.fused_recurrent_efla):
            outputs = function(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(y) for y in outputs])
            named = {**dict(zip(("o", "state"), outputs)), **{f"d{name}": y for name, y in zip(leaves, gradients)}}
            results.update({f"{function.__name__} {name}": y for name, y in named.items()})
        kept = x.pop("initial_state").detach().clone()
        with torch.no_grad():
            first = {name: tensor[:, 0] for name, tensor in x.items()}
            results["step"] = efla.delta_rule_step(**first, state=kept, step="exact")
            few, slots = {name: tensor[:, :5] for name, tensor in x.items()}, torch.tensor([1, 0], device=device)
            results["steps"] = efla.delta_rule_steps(**few, states=kept, slots=slots, step="exact")
        return {**results, "states": kept}

    def test_functions(self):
        for dtype in (torch.float32, torch.bfloat16):
            for decay in (None, "scalar", "channel"):
                expected, got = (self.functions(device, dtype, decay) for device in ("cuda:0", "cuda:1"))
                for name, y in got.items():
                    self.assertEqual(y.device, torch.device("cuda:1"), name)
                    assert_close(self, y.cpu(), expected[name].cpu(), dtype, what=f"{name}, {decay}, {dtype}")
        self.assertEqual(torch.cuda.current_device(), 0)

    def test_layers(self):
        x = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(1))
        gated = {"head_dim": 16, "num_v_heads": 4}
        for kind, named in (("EFLA", {}), ("GatedDeltaNet", gated), ("KimiDeltaAttention", {"head_dim": 16})):
            torch.manual_seed(0)
            layer, results = getattr(efla.layers, kind)(hidden_size=64, num_heads=2, layer_idx=0, **named), []
            for device in ("cuda:0", "cuda:1"):
                copied = copy.deepcopy(layer).to(device)
                y = copied(x.to(device))[0]
                y.square().sum().backward()
                parts, cache = [], None
                with torch.no_grad():
                    for piece in x.to(device).split([67, 1, 1, 1], 1):
                        part, _, cache = copied(piece, past_key_values=cache, use_cache=True)
                        parts.append(part)
                results.append({"y": y, "decoding": torch.cat(parts, 1), **{n: p.grad for n, p in copied.named_parameters()}})
            for name, got in results[1].items():
                self.assertEqual(got.device, torch.device("cuda:1"), name)
                assert_close(self, got.cpu(), results[0][name].cpu(), factor=4, what=f"{kind} {name}")
            assert_close(self, results[1]["decoding"], results[1]["y"], factor=4, what=kind)

    def test_its_current_stream(self):
        x = to("cuda:1", inputs(key_dim=64, value_dim=64, decay="scalar", dtype=torch.bfloat16))
        expected = efla.chunk_efla(**x)[0]
        q, stream = torch.zeros_like(x["q"]), torch.cuda.Stream("cuda:1")
        torch.cuda.synchronize("cuda:1")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            q.copy_(x["q"])
            with torch.cuda.device(0):
                o = efla.chunk_efla(**{**x, "q": q})[0]
            self.assertFalse(stream.query(), "the call waited for the stream")
        stream.synchronize()
        self.assertTrue(torch.equal(o, expected))

    def test_refuses_tensors_of_both(self):
        x = to("cuda:1", {**inputs(batch=1, decay="scalar"), "initial_state": state(sequences=1)})
        x["cu_seqlens"] = torch.tensor([0, 70], device="cuda:1")
        for name in ("k", "v", "beta", "g", "initial_state", "cu_seqlens"):
            with self.assertRaisesRegex(ValueError, f"{name}: got a tensor on cuda:0, expected one on cuda:1"):
                efla.chunk_efla(**{**x, name: x[name].to("cuda:0")})
        x = to("cuda:1", inputs(tokens=1, decay="scalar"))
        few = {**x, "states": state().to("cuda:0"), "slots": torch.tensor([0, 1], device="cuda:1")}
        with self.assertRaisesRegex(ValueError, "states: got a tensor on cuda:0, expected one on cuda:1"):
            efla.delta_rule_steps(**few, step="exact")
        few = {**few, "states": state().to("cuda:1"), "slots": torch.tensor([0, 1], device="cuda:0")}
        with self.assertRaisesRegex(ValueError, "slots: got a tensor on cuda:0, expected one on cuda:1"):
            efla.delta_rule_steps(**few, step="exact")
        few = {**few, "slots": None, "kept": torch.tensor([0, 1], device="cuda:0")}
        with self.assertRaisesRegex(ValueError, "kept: got a tensor on cuda:0, expected one on cuda:1"):
            efla.delta_rule_steps(**few, step="exact")
        for op, named in ((torch.ops.efla.rms_norm, torch.ones(8)), (torch.ops.efla.short_conv, torch.ones(8, 4))):
            with self.assertRaisesRegex(RuntimeError, "weight: got a tensor on cuda:0, expected one on cuda:1"):
                op(torch.ones(1, 5, 8, device="cuda:1"), named.to("cuda:0"))


if __name__ == "__main__":
    unittest.main()
