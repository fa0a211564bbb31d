"""Every function against the recurrence in float64."""

import unittest

import torch
from reference import comba, delta_rule
from support import assert_close, inputs, state

import efla
from efla.ops._gate import channel_gate, scalar_gate

PACKED = torch.tensor([0, 5, 5, 40, 70])


class Values(unittest.TestCase):
    def check(self, got, expected, dtype=torch.float32, what=""):
        assert_close(self, got[0], expected[0], dtype, what=f"{what} o")
        self.assertEqual(got[0].dtype, dtype)
        if got[1] is not None:
            assert_close(self, got[1], expected[1], dtype, what=f"{what} final_state")
            self.assertEqual(got[1].dtype, torch.float64 if dtype == torch.float64 else torch.float32)

    def test_delta_rule(self):
        for function in (efla.chunk_delta_rule, efla.fused_recurrent_delta_rule):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                x, s = inputs(dtype=dtype), state()
                got = function(**x, initial_state=s, output_final_state=True, use_qk_l2norm_in_kernel=True)
                self.check(got, delta_rule(**x, initial_state=s, l2norm=True), dtype, f"{function.__name__} {dtype}")

    def test_gated_delta_rule(self):
        for function in (efla.chunk_gated_delta_rule, efla.fused_recurrent_gated_delta_rule):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x, s = inputs(decay="scalar", dtype=dtype, value_heads=4), state(value_heads=4)
                got = function(**x, initial_state=s, output_final_state=True, scale=0.7)
                self.check(got, delta_rule(**x, initial_state=s, scale=0.7), dtype, f"{function.__name__} {dtype}")

    def test_kda(self):
        for function in (efla.chunk_kda, efla.fused_recurrent_kda):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x, s = inputs(decay="channel", dtype=dtype, value_heads=4), state(value_heads=4)
                got = function(**x, initial_state=s, output_final_state=True)
                self.check(got, delta_rule(**x, initial_state=s), dtype, f"{function.__name__} {dtype}")

    def test_comba_normalises_each_key_on_its_own(self):
        for function in (efla.chunk_comba, efla.fused_recurrent_comba):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                x, s = inputs(decay="scalar", dtype=dtype), state()
                erase_key = 0.7 * x["k"] + 0.05
                got = function(**x, p=erase_key, initial_state=s, output_final_state=True, use_qk_l2norm_in_kernel=True)
                expected = comba(**x, p=erase_key, initial_state=s, l2norm=True)
                self.check(got, expected, dtype, f"{function.__name__} {dtype}")

    def test_comba_takes_decays_that_leave_nothing(self):
        for function in (efla.chunk_comba, efla.fused_recurrent_comba):
            x, s = inputs(decay="scalar"), state()
            x["g"][:, ::7] = -1000.0  # e^1000 is beyond every float
            got = function(**x, p=0.7 * x["k"], initial_state=s, output_final_state=True, use_qk_l2norm_in_kernel=True)
            exact = {**x, "g": x["g"].clamp_min(-600.0)}
            self.check(got, comba(**exact, p=0.7 * x["k"], initial_state=s, l2norm=True), what=function.__name__)

    def test_four_steps_per_token_follow_products_of_permutations_of_five(self):
        # I − 2 k kᵀ with k = (e_a − e_b)/√2 exchanges rows a and b of the state, and four exchanges make every permutation.
        generator = torch.Generator().manual_seed(1)
        tokens, steps = 500, 4
        keys, beta = torch.zeros(tokens * steps, 5), torch.zeros(tokens * steps)
        rows, products = list(range(5)), []
        for t in range(tokens):
            permutation = torch.randperm(5, generator=generator).tolist()
            order = list(range(5))
            for i in range(steps):
                j = order.index(permutation[i])
                if j != i:
                    order[i], order[j] = order[j], order[i]
                    keys[t * steps + i, i], keys[t * steps + i, j] = 0.5**0.5, -(0.5**0.5)
                    beta[t * steps + i] = 2.0
            rows = [rows[i] for i in permutation]
            products.append(rows)
        o, _ = efla.chunk_gated_delta_product(
            torch.eye(5).expand(1, tokens, 5, 5),  # head h reads row h
            keys[None, :, None].expand(1, -1, 5, -1),
            torch.zeros(1, tokens * steps, 5, 5),
            None,
            beta[None, :, None].expand(1, -1, 5),
            steps,
            scale=1.0,
            initial_state=torch.eye(5).expand(1, 5, 5, 5),
        )
        self.assertTrue(torch.equal(o[0].argmax(-1), torch.tensor(products)))
        self.assertLess(float((o[0] - torch.nn.functional.one_hot(torch.tensor(products), 5)).abs().max()), 1e-3)

    def test_efla_and_its_family(self):
        for function in (efla.chunk_efla, efla.fused_recurrent_efla):
            for step in ("exact", "rk2", "rk4", "implicit_euler", "trapezoid", "euler"):
                for decay in (None, "scalar", "channel"):
                    x = inputs(tokens=40, decay=decay)
                    rule = {"step": step, "erase_scale": 1.25, "write_scale": 0.5}
                    expected = delta_rule(**x, **rule)
                    self.check(function(**x, **rule, output_final_state=True), expected, what=f"{step} {decay}")

    def test_steps_in_float16_are_the_forward(self):
        x = inputs(tokens=3, dtype=torch.float16)
        expected = delta_rule(**x, step="exact")
        one, several = torch.zeros_like(state()), torch.zeros_like(state())
        o = torch.stack([efla.delta_rule_step(*(x[n][:, t] for n in x), one, step="exact") for t in range(3)], 1)
        self.check((o, None), expected, torch.float16, "delta_rule_step")
        self.check((efla.delta_rule_steps(*x.values(), several, step="exact"), None), expected, torch.float16, "delta_rule_steps")
        self.assertTrue(torch.equal(one, several))

    def test_the_step_is_exact_unless_said_otherwise(self):
        x = inputs()
        self.check(efla.chunk_efla(**x), delta_rule(**x, step="exact"))

    def test_without_a_final_state(self):
        self.assertIsNone(efla.chunk_delta_rule(**inputs())[1])
        self.assertIsNone(efla.fused_recurrent_kda(**inputs(decay="channel"))[1])

    def test_beta_stands_for_ones_where_it_may_be_absent(self):
        x = inputs(decay="scalar")
        ones = torch.ones_like(x.pop("beta"))
        expected = delta_rule(**x, beta=ones, l2norm=True)
        self.check(efla.fused_recurrent_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True), expected)
        del x["g"]
        expected = delta_rule(**x, beta=ones, l2norm=True)
        self.check(efla.fused_recurrent_delta_rule(**x, use_qk_l2norm_in_kernel=True), expected)

    def test_a_decay_per_channel_in_the_gated_form(self):
        x, gk = inputs(decay="scalar"), inputs(decay="channel", seed=3)["g"]
        expected = delta_rule(**{**x, "g": x["g"].unsqueeze(-1) + gk})
        self.check(efla.fused_recurrent_gated_delta_rule(**x, gk=gk), expected)

    def test_intermediate_states_are_where_a_prefix_ends(self):
        for function, decay in ((efla.chunk_kda, "channel"), (efla.chunk_efla, None)):
            for chunk in (32, 64):
                for v_first in (False, True):
                    x, s = inputs(decay=decay, tokens=150), state()
                    s = s.transpose(-1, -2).contiguous() if v_first else s
                    options = {"state_v_first": v_first, "output_final_state": True}
                    o, final, states = function(
                        **x, initial_state=s, return_intermediate_states=True, chunk_size=chunk, **options
                    )
                    plain = function(**x, initial_state=s, **options)
                    self.assertTrue(torch.equal(o, plain[0]) and torch.equal(final, plain[1]))
                    self.assertEqual(states.shape[1], -(-150 // chunk))
                    for i in range(states.shape[1]):
                        rest = {name: tensor[:, i * chunk :] for name, tensor in x.items()}
                        got = function(**rest, initial_state=states[:, i], **options)
                        assert_close(self, got[0], o[:, i * chunk :], what=f"{function.__name__} from {i * chunk}")
                        assert_close(self, got[1], final, what=f"{function.__name__} from {i * chunk}, final_state")

    def test_intermediate_states_of_packed_sequences(self):
        ends, chunk = [0, 5, 5, 75, 170, 171], 64
        x, s = inputs(batch=1, tokens=171, decay="channel"), state(sequences=5)
        o, final, states = efla.chunk_kda(
            **x, initial_state=s, cu_seqlens=torch.tensor(ends), output_final_state=True, return_intermediate_states=True
        )
        at = 0
        for n, (begin, end) in enumerate(zip(ends, ends[1:])):
            for start in range(begin, end, chunk):
                part = {name: tensor[:, start:end] for name, tensor in x.items()}
                got = efla.chunk_kda(**part, initial_state=states[:, at], output_final_state=True)
                assert_close(self, got[0], o[:, start:end], what=f"sequence {n} from {start}")
                assert_close(self, got[1], final[n : n + 1], what=f"sequence {n} from {start}, final_state")
                at += 1
        self.assertEqual(states.shape[1], at)

    def test_packed_sequences_are_separate_ones(self):
        for function, decay in (
            (efla.chunk_delta_rule, None),
            (efla.fused_recurrent_delta_rule, None),
            (efla.chunk_gated_delta_rule, "scalar"),
            (efla.chunk_kda, "channel"),
            (efla.fused_recurrent_kda, "channel"),
        ):
            x, s = inputs(batch=1, decay=decay), state(sequences=4)
            got = function(**x, initial_state=s, output_final_state=True, cu_seqlens=PACKED.int())
            self.check(got, delta_rule(**x, initial_state=s, cu_seqlens=PACKED), what=function.__name__)

    def test_states_with_values_first(self):
        for function, decay in ((efla.chunk_gated_delta_rule, "scalar"), (efla.fused_recurrent_kda, "channel")):
            x, s = inputs(decay=decay), state()
            turned = s.transpose(-1, -2).contiguous()
            o, final = function(**x, initial_state=turned, output_final_state=True, state_v_first=True)
            self.assertTrue(final.is_contiguous())
            self.check((o, final.transpose(-1, -2)), delta_rule(**x, initial_state=s))

    def test_any_strides(self):
        x = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in inputs(decay="channel").items()}
        self.check(efla.chunk_kda(**x), delta_rule(**x))

    def test_beta_from_its_logits(self):
        x = inputs(decay="scalar")
        logits = torch.logit(x["beta"])
        got = efla.chunk_gated_delta_rule(**{**x, "beta": logits}, use_beta_sigmoid_in_kernel=True)
        self.check(got, delta_rule(**x))
        got = efla.chunk_gated_delta_rule(
            **{**x, "beta": logits}, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True
        )
        self.check(got, delta_rule(**{**x, "beta": 2 * x["beta"]}, l2norm=True))

    def test_the_gate_of_gated_deltanet(self):
        x = inputs(decay="scalar")
        A_log, dt_bias = torch.tensor([0.3, -1.0]), torch.tensor([0.5, -2.0])
        gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        g = -A_log.exp() * torch.log1p((x["g"] + dt_bias).exp())
        expected = delta_rule(**{**x, "g": g})
        self.check(efla.chunk_gated_delta_rule(**x, **gate), expected)
        self.check(efla.fused_recurrent_gated_delta_rule(**x, **gate), expected)

    def test_the_gates_of_kda(self):
        x = inputs(decay="channel")
        A_log, dt_bias = torch.tensor([0.3, -1.0]), torch.linspace(-2, 1, 24)
        raw = x["g"] + dt_bias.view(2, 12)
        for gate, g in (
            ({}, -A_log.exp()[:, None] * torch.log1p(raw.exp())),
            ({"lower_bound": -4.0}, -4 / (1 + (-A_log.exp()[:, None] * raw).exp())),
            ({"lower_bound": -4.0, "A_log": None}, -4 / (1 + (-raw).exp())),
        ):
            gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, **gate}
            expected = delta_rule(**{**x, "g": g})
            self.check(efla.chunk_kda(**x, **gate), expected)
            self.check(efla.fused_recurrent_kda(**x, **gate), expected)
        gate["safe_gate"] = True
        self.check(efla.chunk_kda(**x, **gate), expected)

    def test_rates_that_overflow(self):
        # In float32 exp(A_log) is infinite, and softplus of all but the last of z is 0. σ(exp(A_log) · z) is at its limits.
        z, A_log = torch.tensor([-300.0, -104.0, -200.0]).requires_grad_(), torch.tensor([100.0, 100.0, 89.0]).requires_grad_()
        g = scalar_gate(z, A_log, None)
        expected = -torch.exp(A_log.detach().double() + z.detach().double())
        torch.testing.assert_close(g.double(), expected, rtol=1e-5, atol=1e-37)
        for gradient in torch.autograd.grad(g.sum(), (z, A_log)):
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-37)
        z = torch.tensor([[-1.0, 0.0, 1.0]]).requires_grad_()
        g = channel_gate(z, A_log[:1], None, lower_bound=-4.0)
        self.assertEqual(g.tolist(), [[-4.0 * x for x in (0.0, 0.5, 1.0)]])
        self.assertTrue(torch.autograd.grad(g.sum(), z)[0].isfinite().all())
        for gate in (channel_gate(z, A_log[:1], None), channel_gate(z, A_log[:1], torch.zeros(1, 3))):
            self.assertEqual(gate.exp().tolist(), [[0.0, 0.0, 0.0]])
            for gradient in torch.autograd.grad((gate * gate.exp()).sum(), (z, A_log)):
                self.assertTrue(gradient.isfinite().all())

    def test_one_token_in_place(self):
        for decay in (None, "scalar", "channel"):
            for state_dtype in (torch.float32, torch.bfloat16):
                x = inputs(tokens=1, decay=decay, value_heads=4)
                for two_keys in (False, True):
                    if two_keys:
                        x["erase_key"] = 0.4 * x["k"].flip(-1) + 0.5 * x["k"]
                    s = state(value_heads=4).to(state_dtype)
                    expected = delta_rule(**x, initial_state=s, step="exact")
                    got = efla.delta_rule_step(**{name: tensor[:, 0] for name, tensor in x.items()}, state=s, step="exact")
                    assert_close(self, got, expected[0][:, 0], what=f"{decay} {two_keys} o")
                    assert_close(self, s, expected[1], state_dtype, what=f"{decay} {two_keys} state")

    def test_tokens_of_a_pool_are_the_single_tokens(self):
        for decay in (None, "scalar", "channel"):
            for state_dtype in (torch.float32, torch.bfloat16):
                x = inputs(tokens=5, decay=decay, value_heads=4)
                if decay is not None:
                    x["erase_key"] = 0.5 * x["k"]
                pool, slots = state(sequences=3, value_heads=4).to(state_dtype), torch.tensor([2, 0])
                s, untouched = pool[slots].clone(), pool[1].clone()
                steps = [
                    efla.delta_rule_step(**{n: t[:, i] for n, t in x.items()}, state=s, step="exact") for i in range(5)
                ]
                o = efla.delta_rule_steps(**x, states=pool, slots=slots, step="exact")
                self.assertTrue(torch.equal(o, torch.stack(steps, dim=1)))
                self.assertTrue(torch.equal(pool[slots], s) and torch.equal(pool[1], untouched))
                before = pool.clone()
                o = efla.delta_rule_steps(**x, states=pool, slots=torch.tensor([-1, 1]), step="exact")
                self.assertEqual(o[0].abs().max(), 0)
                self.assertTrue(torch.equal(pool[slots], before[slots]) and not torch.equal(pool[1], before[1]))

    def test_tokens_that_are_not_kept_are_rolled_back(self):
        x = inputs(tokens=5, decay="scalar", value_heads=4)
        pool = state(sequences=2, value_heads=4)
        kept, all_kept = torch.tensor([3, 0]), pool.clone()
        expected = efla.delta_rule_steps(**x, states=all_kept, step="exact")
        first, untouched = pool[:1].clone(), pool[1].clone()
        efla.delta_rule_steps(**{name: tensor[:1, :3] for name, tensor in x.items()}, states=first, step="exact")
        o = efla.delta_rule_steps(**x, states=pool, step="exact", kept=kept)
        self.assertTrue(torch.equal(o, expected))
        self.assertTrue(torch.equal(pool[:1], first) and torch.equal(pool[1], untouched))
        with self.assertRaisesRegex(ValueError, r"kept\[1\]: got 6, expected 0 to 5"):
            efla.delta_rule_steps(**x, states=pool, step="exact", kept=torch.tensor([1, 6]))

    def test_no_tokens(self):
        for function, decay in ((efla.chunk_kda, "channel"), (efla.fused_recurrent_gated_delta_rule, "scalar"), (efla.chunk_efla, None)):
            for packed in (None, torch.tensor([0, 0, 0])):
                x = inputs(tokens=0, decay=decay, value_heads=4, batch=1 if packed is not None else 2)
                x["initial_state"] = state(value_heads=4)
                x = {name: tensor.requires_grad_() for name, tensor in x.items()}
                o, final = function(**x, output_final_state=True, cu_seqlens=packed)
                self.assertEqual(o.shape, x["v"].shape)
                self.assertTrue(torch.equal(final, x["initial_state"]))
                (o.sum() + final.sum()).backward()
                self.assertEqual(x["q"].grad.shape, x["q"].shape)
                self.assertTrue(torch.equal(x["initial_state"].grad, torch.ones_like(final)))
        with torch.no_grad():
            _, final, between = efla.chunk_kda(**inputs(tokens=0, decay="channel"), return_intermediate_states=True)
        self.assertIsNone(final)
        self.assertEqual(between.shape[:2], (2, 0))
        with self.assertRaisesRegex(ValueError, "chunk_kda: k: got shape"):
            efla.chunk_kda(**{**inputs(tokens=0, decay="channel"), "k": torch.zeros(2, 0, 2, 5)})

    def test_an_empty_batch(self):
        for function, decay in ((efla.chunk_kda, "channel"), (efla.fused_recurrent_gated_delta_rule, "scalar"), (efla.chunk_efla, None)):
            for tokens in (0, 1, 40):
                for dtype in (torch.float32, torch.float16, torch.float64):
                    x = inputs(tokens=tokens, batch=0, decay=decay, value_heads=4, dtype=dtype)
                    x = {**x, "initial_state": state(sequences=0, value_heads=4)}
                    x = {name: tensor.requires_grad_() for name, tensor in x.items()}
                    o, final = function(**x, output_final_state=True, state_v_first=False)
                    self.assertEqual((o.shape, o.dtype), (x["v"].shape, dtype))
                    self.assertEqual(final.shape, x["initial_state"].shape)
                    (o.sum() + final.sum()).backward()
                    for tensor in x.values():
                        self.assertEqual(tensor.grad.shape, tensor.shape)
        with torch.no_grad():
            x = inputs(tokens=70, batch=0, decay="channel")
            _, _, between = efla.chunk_kda(**x, return_intermediate_states=True)
        self.assertEqual(between.shape, (0, 2, 2, 12, 10))
        with self.assertRaisesRegex(ValueError, r"chunk_kda: k: got shape \[2, 70, 2, 12\]"):
            efla.chunk_kda(**{**x, "k": inputs()["k"]})

    def test_empty_arguments_that_do_not_fit(self):
        def refuses(message, function, **arguments):
            with self.assertRaises(ValueError) as caught:
                function(**arguments)
            self.assertIn(f"{function.__name__}: {message}", str(caught.exception))

        for function in (efla.chunk_kda, efla.fused_recurrent_kda):
            for none, one in ({"tokens": 0}, {"tokens": 1}), ({"batch": 0}, {"batch": 1}):
                x, other = inputs(**none, decay="channel"), inputs(**one, decay="channel")
                for name in ("k", "v", "g", "beta"):
                    refuses(f"{name}: got shape {list(other[name].shape)}", function, **{**x, name: other[name]})
                refuses("initial_state: got shape [1, 2, 12, 10]", function, **x, initial_state=state(1))
            x = inputs(tokens=0, batch=1, decay="channel")
            for numbers, message in (
                ([0, 1, 0], "cu_seqlens[1]: got 1, expected 0, because T = 0"),
                ([0, 5], "cu_seqlens[1]: got 5, expected 0, because T = 0"),
                ([-1, 0], "cu_seqlens[0]: got -1, expected 0, because T = 0"),
                ([0], "cu_seqlens: got shape [1]"),
            ):
                refuses(message, function, **x, cu_seqlens=torch.tensor(numbers))


if __name__ == "__main__":
    unittest.main()
