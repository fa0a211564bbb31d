// The delta rule as a LibTorch function: values and gradients against the recurrence in tensor operations.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <functional>
#include <vector>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/tensor_view.h"
#include "efla/base/error.h"
#include "efla/ops/delta.h"
#include "tests/support/expect_error.h"
#include "tests/support/torch_tensors.h"

namespace efla::autograd {
namespace {

using test::max_difference;
using test::random_tensor;
using torch::Tensor;

DeltaRule exact_rule() {
  DeltaRule rule;
  rule.step = parse_step_size("exact");
  return rule;
}

// The recurrence in tensor operations, differentiable by LibTorch itself.
DeltaRuleOutput eager(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, Tensor state) {
  const std::int64_t tokens = q.size(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  std::vector<Tensor> outputs;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto kt = k.select(1, t).unsqueeze(-1), vt = v.select(1, t).unsqueeze(-1),
               bt = beta.select(1, t);  // [B,H,K,1]
    const auto lambda = kt.square().sum({-2, -1});
    const auto gain = (-torch::expm1(-bt * lambda) / lambda).unsqueeze(-1).unsqueeze(-1);
    state = state + kt.matmul((gain * (vt - state.transpose(-1, -2).matmul(kt))).transpose(-1, -2));
    outputs.push_back(scale * state.transpose(-1, -2).matmul(q.select(1, t).unsqueeze(-1)).squeeze(-1));
  }
  return {torch::stack(outputs, 1), state};
}

struct Case {
  Tensor q, k, v, beta, state;

  std::vector<Tensor> all() const { return {q, k, v, beta, state}; }
};

Case make_case(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t key_dim,
               std::int64_t value_dim, at::ScalarType dtype) {
  Case c{random_tensor({batch, tokens, heads, key_dim}, 1), random_tensor({batch, tokens, heads, key_dim}, 2),
         random_tensor({batch, tokens, heads, value_dim}, 3), torch::sigmoid(random_tensor({batch, tokens, heads}, 4)),
         random_tensor({batch, heads, key_dim, value_dim}, 5)};
  for (Tensor* tensor : {&c.q, &c.k, &c.v, &c.beta, &c.state}) *tensor = tensor->to(dtype).requires_grad_(true);
  return c;
}

TEST(DeltaRuleFunction, MatchesTheRecurrenceInTensorOperations) {
  for (const char* implementation : {"auto", "chunk", "recurrent", "ref"}) {
    SCOPED_TRACE(implementation);
    const bool ref = std::string(implementation) == "ref";
    const Case c = make_case(2, 40, 3, 8, 16, ref ? torch::kDouble : torch::kFloat);
    const auto out = delta_rule({c.q, c.k, c.v, c.beta, c.state}, exact_rule(), implementation);
    const Case d = make_case(2, 40, 3, 8, 16, torch::kDouble);
    const auto expected = eager(d.q, d.k, d.v, d.beta, d.state);
    const double tolerance = ref ? 1e-12 : 1e-5;
    EXPECT_LE(max_difference(out.o, expected.o), tolerance);
    EXPECT_LE(max_difference(out.final_state, expected.final_state), tolerance);

    const auto weight = random_tensor({2, 40, 3, 16}, 6), state_weight = random_tensor({2, 3, 8, 16}, 7);
    const auto loss = [&](const DeltaRuleOutput& o) {
      return (o.o * weight.to(o.o.scalar_type())).sum() + (o.final_state * state_weight.to(o.o.scalar_type())).sum();
    };
    const auto gradients = torch::autograd::grad({loss(out)}, c.all());
    const auto expected_gradients = torch::autograd::grad({loss(expected)}, d.all());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_LE(max_difference(gradients[i], expected_gradients[i]), 10 * tolerance) << "input " << i;
    }
  }
}

TEST(DeltaRuleFunction, TakesStridedTensorsAndPackedOnesToTheSameBits) {
  const std::int64_t heads = 2, dim = 16;
  const auto qkv = random_tensor({3, 50, 3 * heads * dim}, 1).to(torch::kFloat).requires_grad_(true);
  const auto beta = torch::sigmoid(random_tensor({3, 50, heads}, 2)).to(torch::kFloat).requires_grad_(true);
  const auto part = [&](std::int64_t i) {
    return qkv.narrow(2, i * heads * dim, heads * dim).view({3, 50, heads, dim});
  };
  const auto packed = delta_rule_packed(qkv, beta, {}, heads, dim, exact_rule());
  const auto strided = delta_rule({part(0), part(1), part(2), beta}, exact_rule()).o;
  const auto contiguous =
      delta_rule({part(0).contiguous(), part(1).contiguous(), part(2).contiguous(), beta}, exact_rule()).o;
  EXPECT_TRUE(torch::equal(packed, strided));
  EXPECT_TRUE(torch::equal(packed, contiguous));
  const auto gradient = [&](const Tensor& o) { return torch::autograd::grad({o.square().sum()}, {qkv, beta}); };
  const auto from_packed = gradient(packed), from_strided = gradient(strided);
  EXPECT_TRUE(torch::equal(from_packed[0], from_strided[0]));
  EXPECT_TRUE(torch::equal(from_packed[1], from_strided[1]));
}

TEST(DeltaRuleFunction, LeavesOutAFinalStateThatNobodyAsksFor) {
  for (const char* implementation : {"chunk", "recurrent"}) {
    const Case c = make_case(2, 40, 3, 8, 16, torch::kFloat);
    const DeltaRuleInput in{c.q, c.k, c.v, c.beta, c.state};
    const auto with = delta_rule(in, exact_rule(), implementation);
    const auto without = delta_rule(in, exact_rule(), implementation, false);
    EXPECT_EQ(without.final_state.numel(), 0);
    EXPECT_FALSE(without.final_state.requires_grad());
    EXPECT_TRUE(torch::equal(without.o, with.o));
    const auto expected = torch::autograd::grad({with.o.square().sum()}, c.all());
    const auto got = torch::autograd::grad({without.o.square().sum()}, c.all());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << "input " << i;
  }
}

// Gradients of a decayed, grouped and packed problem, with one key and with two: float32 against the float64 reference,
// and one sequence of it alone.
void check_packed_problem(bool channel, bool two_keys) {
  const auto ends = torch::tensor({0, 7, 7, 45}, torch::kLong);
  const auto inputs = [&](at::ScalarType dtype) {
    std::vector<std::int64_t> g_sizes{1, 45, 4};
    if (channel) g_sizes.push_back(8);
    std::vector<Tensor> all{random_tensor({1, 45, 2, 8}, 1),  random_tensor({1, 45, 2, 8}, 2),
                            random_tensor({1, 45, 4, 16}, 3), torch::sigmoid(random_tensor({1, 45, 4}, 4)),
                            random_tensor({3, 4, 8, 16}, 5),  -torch::softplus(random_tensor(g_sizes, 6))};
    if (two_keys) all.push_back(torch::sigmoid(random_tensor({1, 45, 2, 8}, 7)) * all[1]);
    for (auto& tensor : all) tensor = tensor.to(dtype).requires_grad_(true);
    return all;
  };
  const auto input_of = [&](const std::vector<Tensor>& in) {
    return DeltaRuleInput{in[0], in[1], in[2], in[3], in[4], in[5], ends, two_keys ? in[6] : Tensor()};
  };
  const auto run = [&](const std::vector<Tensor>& in, const std::string& implementation) {
    const auto out = delta_rule(input_of(in), exact_rule(), implementation);
    auto gradients = torch::autograd::grad({out.o.square().sum() + out.final_state.sum()}, in);
    gradients.push_back(out.o);
    gradients.push_back(out.final_state);
    return gradients;
  };
  const auto expected = run(inputs(torch::kDouble), "ref");
  for (const char* implementation : {"chunk", "recurrent"}) {
    const auto got = run(inputs(torch::kFloat), implementation);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double size = expected[i].abs().max().item<double>();
      EXPECT_LE(max_difference(got[i], expected[i]), 1e-5 * std::max(1.0, size)) << implementation << ' ' << i;
    }
  }
  const torch::NoGradGuard no_grad;
  const auto in = inputs(torch::kFloat);
  const auto part = [&](const Tensor& t) { return t.narrow(1, 7, 38); };
  DeltaRuleInput one{part(in[0]), part(in[1]), part(in[2]), part(in[3]), in[4].narrow(0, 2, 1), part(in[5])};
  if (two_keys) one.erase_key = part(in[6]);
  const auto alone = delta_rule(one, exact_rule());
  const auto packed = delta_rule(input_of(in), exact_rule());
  EXPECT_TRUE(torch::equal(alone.o, part(packed.o)));
  EXPECT_TRUE(torch::equal(alone.final_state, packed.final_state.narrow(0, 2, 1)));
  EXPECT_TRUE(torch::equal(packed.final_state[1], in[4][1])) << "an empty sequence keeps its state";
}

TEST(DeltaRuleFunction, TakesDecaysGroupedHeadsPackedSequencesAndTwoKeys) {
  for (const bool channel : {false, true}) {
    for (const bool two_keys : {false, true}) {
      SCOPED_TRACE(testing::Message() << "channel " << channel << ", two keys " << two_keys);
      check_packed_problem(channel, two_keys);
    }
  }
}

TEST(DeltaRuleFunction, GivesShapesOfMetaTensors) {
  const Case c = make_case(2, 70, 3, 8, 16, torch::kFloat);
  const auto meta = [](const Tensor& t) { return t.detach().to(torch::kMeta).requires_grad_(true); };
  const Case m{meta(c.q), meta(c.k), meta(c.v), meta(c.beta), meta(c.state)};
  const auto out = delta_rule({m.q, m.k, m.v, m.beta, m.state}, exact_rule());
  EXPECT_EQ(out.o.sizes(), c.v.sizes());
  EXPECT_EQ(out.final_state.sizes(), c.state.sizes());
  const auto gradients = torch::autograd::grad({out.o.sum()}, m.all());
  for (std::size_t i = 0; i < gradients.size(); ++i) EXPECT_EQ(gradients[i].sizes(), c.all()[i].sizes());
}

TEST(DeltaRuleFunction, NamesTheStepWhoseMetaTensorsDoNotFit) {
  const torch::NoGradGuard no_grad;
  const Case c = make_case(2, 3, 1, 4, 4, torch::kFloat);
  const auto meta = [](const Tensor& t) { return t.to(torch::kMeta); };
  const auto few = meta(c.state.narrow(0, 0, 1));
  const auto call = [](const char* name, torch::jit::Stack stack) {
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  };
  const auto token = [&](const Tensor& t) { return meta(t.select(1, 0)); };
  test::expect_error(
      [&] {
        call("efla::delta_rule_step", {token(c.q), token(c.k), token(c.v), token(c.beta), c10::IValue(), few,
                                       c10::IValue(), "exact", 1.0, 1.0, false, "auto", c10::IValue()});
      },
      "state", "delta_rule_step: ");
  test::expect_error(
      [&] {
        call("efla::delta_rule_steps",
             {meta(c.q), meta(c.k), meta(c.v), meta(c.beta), c10::IValue(), few, c10::IValue(), c10::IValue(),
              c10::IValue(), "exact", 1.0, 1.0, false, "auto", c10::IValue()});
      },
      "states", "delta_rule_steps: ");
}

TEST(DeltaRuleFunction, RefusesCuSeqlensWithoutAxes) {
  const Case c = make_case(1, 20, 1, 4, 4, torch::kFloat);
  for (const auto device : {torch::kCPU, torch::kMeta}) {
    const auto on = [&](const Tensor& t) { return t.detach().to(device).requires_grad_(true); };
    const auto cu_seqlens = torch::tensor(20, torch::kLong).to(device);
    test::expect_error(
        [&] {
          delta_rule({on(c.q), on(c.k), on(c.v), on(c.beta), {}, {}, cu_seqlens}, exact_rule());
        },
        "cu_seqlens", "[N + 1]");
  }
}

// A state in bfloat16 is rounded at every token and nowhere else.
TEST(DeltaRuleFunction, StepsOnAStateInBfloat16) {
  const torch::NoGradGuard no_grad;
  const Case c = make_case(2, 20, 3, 16, 32, torch::kFloat);
  Tensor narrow = c.state.to(torch::kBFloat16), wide = narrow.to(torch::kFloat);
  const auto g = -torch::softplus(random_tensor({2, 3, 16}, 8)).to(torch::kFloat);
  for (std::int64_t t = 0; t < 20; ++t) {
    const auto step = [&](Tensor& state) {
      return delta_rule_step(c.q.select(1, t), c.k.select(1, t), c.v.select(1, t), c.beta.select(1, t), g, state,
                             exact_rule());
    };
    const auto o = step(narrow);
    EXPECT_TRUE(torch::equal(o, step(wide))) << t;
    wide = wide.to(torch::kBFloat16).to(torch::kFloat);
    EXPECT_TRUE(torch::equal(narrow.to(torch::kFloat), wide)) << t;
  }
}

TEST(DeltaRuleFunction, StepByStepIsTheWhole) {
  const torch::NoGradGuard no_grad;
  const Case c = make_case(2, 20, 3, 16, 32, torch::kFloat);
  const auto whole = delta_rule({c.q, c.k, c.v, c.beta, c.state}, exact_rule());
  Tensor state = c.state.clone();
  for (std::int64_t t = 0; t < 20; ++t) {
    const auto o = delta_rule_step(c.q.select(1, t), c.k.select(1, t), c.v.select(1, t), c.beta.select(1, t), {}, state,
                                   exact_rule());
    EXPECT_LE(max_difference(o, whole.o.select(1, t)), 1e-5) << t;
  }
  EXPECT_LE(max_difference(state, whole.final_state), 1e-5);
}

TEST(DeltaRuleFunction, IsAnOpOfTheDispatcher) {
  const torch::NoGradGuard no_grad;
  const Case c = make_case(1, 10, 1, 4, 4, torch::kFloat);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule", "");
  torch::jit::Stack stack{c.q,     c.k, c.v, c.beta, c10::IValue(), c.state, c10::IValue(), c10::IValue(),
                          "exact", 1.0, 1.0, false,  "auto",        true,    c10::IValue()};
  op.callBoxed(&stack);
  ASSERT_EQ(stack.size(), 2U);
  EXPECT_TRUE(torch::equal(stack[0].toTensor(), delta_rule({c.q, c.k, c.v, c.beta, c.state}, exact_rule()).o));
}

TEST(DeltaRuleFunction, ReturnsTheStatesBeforeEveryInterval) {
  const torch::NoGradGuard no_grad;
  const Case c = make_case(1, 40, 2, 4, 4, torch::kFloat);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule_with_states", "");
  const auto call = [&](std::int64_t interval, const char* implementation) {
    torch::jit::Stack stack{c.q,     c.k, c.v, c.beta, c10::IValue(),  c.state,  c10::IValue(), c10::IValue(),
                            "exact", 1.0, 1.0, false,  implementation, interval, c10::IValue()};
    op.callBoxed(&stack);
    return stack[2].toTensor();
  };
  const auto head = [&](const Tensor& t) { return t.narrow(1, 0, 32); };
  const auto first = delta_rule({head(c.q), head(c.k), head(c.v), head(c.beta), c.state}, exact_rule());
  const auto states = call(32, "auto");
  ASSERT_EQ(states.sizes(), at::IntArrayRef({1, 2, 2, 4, 4}));
  EXPECT_TRUE(torch::equal(states.select(1, 0), c.state));
  EXPECT_LE(max_difference(states.select(1, 1), first.final_state), 1e-6);
  const auto fine = call(8, "ref");
  ASSERT_EQ(fine.sizes(), at::IntArrayRef({1, 5, 2, 4, 4}));
  EXPECT_LE(max_difference(fine.select(1, 4), first.final_state), 1e-5);
  EXPECT_THROW(call(8, "recurrent"), Error) << "the SIMD kernels save a state per 32 tokens";
  EXPECT_THROW(call(0, "auto"), Error);
}

TEST(DeltaRuleFunction, NamesTheTensorThatIsWrong) {
  const Case c = make_case(1, 10, 1, 4, 4, torch::kFloat);
  const auto message = [&](const std::function<void()>& action) -> std::string {
    try {
      action();
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT_NE(message([&] {
              delta_rule({c.q, c.k.select(1, 0), c.v, c.beta}, exact_rule());
            }).find("k: "),
            std::string::npos);
  EXPECT_NE(message([&] {
              delta_rule({c.q, c.k, c.v.to(torch::kDouble), c.beta}, exact_rule());
            }).find("v: got dtype Double"),
            std::string::npos)
      << message([&] {
           delta_rule({c.q, c.k, c.v.to(torch::kDouble), c.beta}, exact_rule());
         });
  EXPECT_NE(message([&] {
              delta_rule({c.q, c.k, c.v, c.beta.narrow(1, 0, 9)}, exact_rule());
            }).find("beta"),
            std::string::npos);
}

}  // namespace
}  // namespace efla::autograd
