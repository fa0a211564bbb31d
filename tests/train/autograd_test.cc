// The operators as LibTorch functions: values against tensor operations, gradients against finite differences.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "efla/autograd/autocast.h"
#include "efla/autograd/context.h"
#include "efla/autograd/delta_rule.h"
#include "efla/autograd/graph_replay.h"
#include "efla/autograd/layers/add_rms_norm.h"
#include "efla/autograd/layers/decay_gate.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/lookup.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/layers/short_conv.h"
#include "efla/autograd/layers/swiglu.h"
#include "efla/autograd/tensor_view.h"
#include "efla/base/error.h"
#include "efla/ops/delta.h"
#include "efla/ops/layers/add_rms_norm.h"
#include "efla/ops/layers/decay_gate.h"
#include "efla/ops/layers/glu.h"
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

// Gradients of a decayed, grouped and packed problem: float32 against the float64 reference, and one sequence of it
// alone.
TEST(DeltaRuleFunction, TakesDecaysGroupedHeadsAndPackedSequences) {
  const auto ends = torch::tensor({0, 7, 7, 45}, torch::kLong);
  for (const bool channel : {false, true}) {
    const auto inputs = [&](at::ScalarType dtype) {
      std::vector<std::int64_t> g_sizes{1, 45, 4};
      if (channel) g_sizes.push_back(8);
      std::vector<Tensor> all{random_tensor({1, 45, 2, 8}, 1),  random_tensor({1, 45, 2, 8}, 2),
                              random_tensor({1, 45, 4, 16}, 3), torch::sigmoid(random_tensor({1, 45, 4}, 4)),
                              random_tensor({3, 4, 8, 16}, 5),  -torch::softplus(random_tensor(g_sizes, 6))};
      for (auto& tensor : all) tensor = tensor.to(dtype).requires_grad_(true);
      return all;
    };
    const auto run = [&](const std::vector<Tensor>& in, const std::string& implementation) {
      const auto out = delta_rule({in[0], in[1], in[2], in[3], in[4], in[5], ends}, exact_rule(), implementation);
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
    const auto alone = delta_rule(
        {part(in[0]), part(in[1]), part(in[2]), part(in[3]), in[4].narrow(0, 2, 1), part(in[5])}, exact_rule());
    const auto packed = delta_rule({in[0], in[1], in[2], in[3], in[4], in[5], ends}, exact_rule());
    EXPECT_TRUE(torch::equal(alone.o, part(packed.o)));
    EXPECT_TRUE(torch::equal(alone.final_state, packed.final_state.narrow(0, 2, 1)));
    EXPECT_TRUE(torch::equal(packed.final_state[1], in[4][1])) << "an empty sequence keeps its state";
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
                                       c10::IValue(), "exact", 1.0, 1.0, false, "auto"});
      },
      "state", "delta_rule_step: ");
  test::expect_error(
      [&] {
        call("efla::delta_rule_steps", {meta(c.q), meta(c.k), meta(c.v), meta(c.beta), c10::IValue(), few,
                                        c10::IValue(), c10::IValue(), c10::IValue(), "exact", 1.0, 1.0, false, "auto"});
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
  torch::jit::Stack stack{c.q,           c.k,     c.v, c.beta, c10::IValue(), c.state, c10::IValue(),
                          c10::IValue(), "exact", 1.0, 1.0,    false,         "auto"};
  op.callBoxed(&stack);
  ASSERT_EQ(stack.size(), 2U);
  EXPECT_TRUE(torch::equal(stack[0].toTensor(), delta_rule({c.q, c.k, c.v, c.beta, c.state}, exact_rule()).o));
}

TEST(DeltaRuleFunction, ReturnsTheStatesBeforeEveryInterval) {
  const torch::NoGradGuard no_grad;
  const Case c = make_case(1, 40, 2, 4, 4, torch::kFloat);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("efla::delta_rule_with_states", "");
  const auto call = [&](std::int64_t interval, const char* implementation) {
    torch::jit::Stack stack{c.q,           c.k,     c.v, c.beta, c10::IValue(), c.state,        c10::IValue(),
                            c10::IValue(), "exact", 1.0, 1.0,    false,         implementation, interval};
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

TEST(ShortConv, MatchesConv1d) {
  for (const std::int64_t taps : {1, 4, 7}) {
    const auto x = random_tensor({2, 30, 21}, 1).to(torch::kFloat).requires_grad_(true);
    const auto weight = random_tensor({19, 1, taps}, 2).to(torch::kFloat).requires_grad_(true);
    const auto [y, rest] = short_conv_split(x, weight);
    const auto padded = torch::constant_pad_nd(x.narrow(2, 0, 19).transpose(1, 2), {taps - 1, 0});
    const auto expected = torch::silu(torch::conv1d(padded, weight, {}, 1, at::IntArrayRef{0}, 1, 19)).transpose(1, 2);
    EXPECT_LE(max_difference(y, expected), 2e-6);
    EXPECT_TRUE(torch::equal(rest, x.slice(2, 19)));
    const auto loss = [&](const Tensor& out, const Tensor& tail) { return out.square().sum() + 3 * tail.sum(); };
    const auto gradients = torch::autograd::grad({loss(y, rest)}, {x, weight});
    const auto expected_gradients = torch::autograd::grad({loss(expected, x.slice(2, 19))}, {x, weight});
    EXPECT_LE(max_difference(gradients[0], expected_gradients[0]), 2e-5);
    EXPECT_LE(max_difference(gradients[1], expected_gradients[1]), 2e-4);
  }
}

TEST(RowsAt, HasTheGradientOfIndexSelect) {
  for (const std::vector<std::int64_t>& numbers :
       {std::vector<std::int64_t>{0, 2, 3, 6}, {1, 4, 5, 5, 5}, {6}, {0, 0}}) {
    const auto x = random_tensor({7, 5}, 1).requires_grad_(true);
    const auto places = torch::tensor(numbers), expected = x.index_select(0, places);
    auto gradient = random_tensor(expected.sizes().vec(), 2);
    for (std::size_t i = 1; i < numbers.size(); ++i) {
      if (numbers[i] == numbers[i - 1]) gradient[static_cast<std::int64_t>(i)].zero_();
    }
    const auto rows = rows_at(x, places);
    EXPECT_TRUE(torch::equal(rows, expected));
    EXPECT_TRUE(torch::equal(torch::autograd::grad({rows}, {x}, {gradient})[0],
                             torch::autograd::grad({expected}, {x}, {gradient})[0]));
  }
}

TEST(RmsNorm, MatchesTensorOperations) {
  for (const bool weighted : {true, false}) {
    const auto x = random_tensor({2, 30, 3, 20}, 1).to(torch::kFloat).requires_grad_(true);
    const auto weight = random_tensor({20}, 2).to(torch::kFloat).requires_grad_(true);
    const auto y = rms_norm(x, weighted ? weight : Tensor(), 1e-6);
    auto expected = x * torch::rsqrt(x.square().mean(-1, true) + 1e-6);
    if (weighted) expected = expected * weight;
    EXPECT_LE(max_difference(y, expected), 2e-6);
    const auto target = random_tensor({2, 30, 3, 20}, 3).to(torch::kFloat);
    std::vector<Tensor> inputs{x};
    if (weighted) inputs.push_back(weight);
    const auto gradients = torch::autograd::grad({(y * target).sum()}, inputs);
    const auto expected_gradients = torch::autograd::grad({(expected * target).sum()}, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LE(max_difference(gradients[i], expected_gradients[i]), 3e-5) << i;
    }
  }
}

TEST(RmsNorm, GatedMatchesTensorOperations) {
  for (const auto activation : {GateActivation::silu, GateActivation::sigmoid}) {
    const auto x = random_tensor({2, 30, 3, 20}, 1).to(torch::kFloat).requires_grad_(true);
    const auto weight = random_tensor({20}, 2).to(torch::kFloat).requires_grad_(true);
    const auto gate = random_tensor({2, 30, 3, 20}, 4).to(torch::kFloat).requires_grad_(true);
    const auto y = gated_rms_norm(x, gate, weight, activation, 1e-6);
    const auto act = activation == GateActivation::silu ? torch::silu(gate) : torch::sigmoid(gate);
    const auto expected = x * torch::rsqrt(x.square().mean(-1, true) + 1e-6) * weight * act;
    EXPECT_LE(max_difference(y, expected), 2e-6);
    const auto target = random_tensor({2, 30, 3, 20}, 3).to(torch::kFloat);
    const std::vector<Tensor> inputs{x, weight, gate};
    const auto gradients = torch::autograd::grad({(y * target).sum()}, inputs);
    const auto expected_gradients = torch::autograd::grad({(expected * target).sum()}, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_LE(max_difference(gradients[i], expected_gradients[i]), 3e-5) << i;
    }
    EXPECT_THROW(gated_rms_norm(x, gate.narrow(0, 0, 1), weight, activation), Error);
  }
}

TEST(AddRmsNorm, IsWhatTheReferenceOfTheFusedKernelComputes) {
  const auto x = random_tensor({6, 20}, 1).to(torch::kFloat).requires_grad_(true);
  const auto branch = random_tensor({6, 20}, 2).to(torch::kFloat).requires_grad_(true);
  const auto weight = random_tensor({20}, 3).to(torch::kFloat).requires_grad_(true);
  const auto dsum = random_tensor({6, 20}, 4).to(torch::kFloat), dy = random_tensor({6, 20}, 5).to(torch::kFloat);
  const auto [sum, y] = add_rms_norm(x, branch, weight, 1e-3);
  const auto gradients = torch::autograd::grad({(sum * dsum).sum() + (y * dy).sum()}, {x, branch, weight});

  const RunOptions ref{.implementation = "ref"};
  const Tensor expected_sum = torch::empty({6, 20}), expected_y = torch::empty({6, 20});
  add_rms_norm_forward(AddRmsNormForward<float>{view_of<const float, 2>(x), view_of<const float, 2>(branch),
                                                view_of<const float, 1>(weight), 1e-3F, view_of<float, 2>(expected_sum),
                                                view_of<float, 2>(expected_y)},
                       ref);
  EXPECT_LE(max_difference(sum, expected_sum), 1e-6);
  EXPECT_LE(max_difference(y, expected_y), 2e-6);
  const Tensor dx = torch::empty({6, 20}), dbranch = torch::empty({6, 20}), dweight = torch::empty({20});
  add_rms_norm_backward(
      AddRmsNormBackward<float>{view_of<const float, 2>(expected_sum), view_of<const float, 1>(weight), 1e-3F,
                                view_of<const float, 2>(dy), view_of<const float, 2>(dsum), view_of<float, 2>(dx),
                                view_of<float, 2>(dbranch), view_of<float, 1>(dweight)},
      ref);
  EXPECT_LE(max_difference(gradients[0], dx), 3e-5);
  EXPECT_LE(max_difference(gradients[1], dbranch), 3e-5);
  EXPECT_LE(max_difference(gradients[2], dweight), 3e-5);
}

TEST(Swiglu, IsWhatTheReferenceOfTheFusedKernelComputes) {
  const auto gate = (3 * random_tensor({6, 20}, 1)).to(torch::kFloat).requires_grad_(true);
  const auto up = random_tensor({6, 20}, 2).to(torch::kFloat).requires_grad_(true);
  const auto dy = random_tensor({6, 20}, 3).to(torch::kFloat);
  const auto eye = torch::eye(20), zero = torch::zeros({20, 20});
  const auto y = swiglu_mlp(torch::cat({gate, up}, 1), torch::cat({eye, zero}, 1), torch::cat({zero, eye}, 1), eye);
  const auto gradients = torch::autograd::grad({y}, {gate, up}, {dy});

  const RunOptions ref{.implementation = "ref"};
  const Tensor expected_y = torch::empty({6, 20}), dgate = torch::empty({6, 20}), dup = torch::empty({6, 20});
  const auto a = view_of<const float, 2>(gate), b = view_of<const float, 2>(up), c = view_of<const float, 2>(dy);
  glu_forward(GluForward<float>{a, b, view_of<float, 2>(expected_y)}, ref);
  glu_backward(GluBackward<float>{a, b, c, view_of<float, 2>(dgate), view_of<float, 2>(dup)}, ref);
  EXPECT_LE(max_difference(y, expected_y), 1e-6);
  EXPECT_LE(max_difference(gradients[0], dgate), 1e-6);
  EXPECT_LE(max_difference(gradients[1], dup), 1e-6);
}

// Calls f with products in float32, then in bfloat16, with the error that these products may have.
void with_products_on_gpu(const std::function<void(double most)>& f) {
  f(1e-4);
  const Bfloat16OnGpu precision;
  f(3e-2);
}

// Gradients of the functions that differ on a GPU, against LibTorch's operators in float64 on the CPU.
TEST(OnAGpu, MlpsEmbeddingsAndBiasesHaveTheGradientsOfLibTorch) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  using Tensors = std::vector<Tensor>;
  const auto expect_gradients = [](const Tensors& inputs, const std::function<Tensor(const Tensors&)>& f,
                                   const std::function<Tensor(const Tensors&)>& exact, double most) {
    const auto leaves = [&](at::Device device, at::ScalarType type) {
      Tensors copies;
      for (const auto& x : inputs) copies.push_back(x.to(device, type).requires_grad_());
      return copies;
    };
    const auto here = leaves(at::kCPU, at::kDouble), there = leaves(at::kCUDA, at::kFloat);
    const auto expected = exact(here), got = f(there);
    const auto dy = random_tensor(expected.sizes().vec(), 9);
    EXPECT_LE(max_difference(got.detach().cpu(), expected), most * expected.abs().max().item<double>());
    const auto wanted = torch::autograd::grad({expected}, here, {dy});
    const auto gradients = torch::autograd::grad({got}, there, {dy.to(at::kCUDA, got.scalar_type())});
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(gradients[i].scalar_type(), at::kFloat) << i;
      EXPECT_LE(max_difference(gradients[i].cpu(), wanted[i]), most * wanted[i].abs().max().item<double>()) << i;
    }
  };
  with_products_on_gpu([&](double most) {
    expect_gradients(
        {random_tensor({2, 9, 16}, 1), random_tensor({24, 16}, 2), random_tensor({24, 16}, 3),
         random_tensor({16, 24}, 4)},
        [](const Tensors& x) { return swiglu_mlp(x[0], x[1], x[2], x[3]); },
        [](const Tensors& x) {
          return torch::matmul(torch::silu(torch::matmul(x[0], x[1].t())) * torch::matmul(x[0], x[2].t()), x[3].t());
        },
        most);
    expect_gradients(
        {random_tensor({2, 9, 40}, 1), random_tensor({24, 16}, 2), random_tensor({24}, 3)},
        [](const Tensors& x) { return autograd::linear(x[0].narrow(2, 8, 16), x[1], x[2]); },
        [](const Tensors& x) { return torch::matmul(x[0].narrow(2, 8, 16), x[1].t()) + x[2]; }, most);
    const auto ids = torch::arange(60).remainder(7).view({5, 12});
    expect_gradients(
        {random_tensor({9, 16}, 1)}, [&](const Tensors& x) { return autograd::embedding(x[0], ids.to(at::kCUDA)); },
        [&](const Tensors& x) { return torch::embedding(x[0], ids); }, 1e-5);
  });
}

// The first call with a shape computes at once, the second captures, and the third replays.
TEST(OnAGpu, ReplayedGraphsComputeWhatTheFunctionComputes) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  Tensor sum = torch::zeros({}, at::kCUDA);
  const auto add_squares = [&](const std::vector<Tensor>& inputs) {
    const Tensor squares = inputs[0] * inputs[0];
    sum.add_(squares.sum());
    return std::vector<Tensor>{squares};
  };
  GraphReplay replay;
  double expected = 0.0;
  for (int round = 0; round < 3; ++round) {
    for (const std::int64_t count : {5, 1 << 20, 7}) {
      const Tensor x = torch::full({count}, 1.0 + round, at::kCUDA);
      const double square = (1.0 + round) * (1.0 + round);
      EXPECT_EQ(replay.call(add_squares, {x}, {sum}).front().eq(square).sum().item<std::int64_t>(), count) << round;
      expected += square * static_cast<double>(count);
      EXPECT_DOUBLE_EQ(sum.item<double>(), expected) << round;
    }
  }
}

TEST(OnAGpu, AGraphIsCapturedAgainForOtherTensorsHeld) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  GraphReplay replay;
  for (int i = 0; i < 2; ++i) {
    Tensor sum = torch::zeros({3}, at::kCUDA);
    const auto add = [&](const std::vector<Tensor>& inputs) { return std::vector<Tensor>{sum.add_(inputs[0])}; };
    for (int call = 1; call <= 3; ++call) {
      replay.call(add, {torch::ones({3}, at::kCUDA)}, {sum});
      EXPECT_EQ(sum.sum().item<double>(), 3.0 * call) << i;
    }
  }
}

// Threads end their graphs at the same time, as the runs of a study may.
TEST(OnAGpu, GraphsOfSeveralThreadsComeAndGo) {
  if (!torch::cuda::is_available() || !has_gpu_kernels())
    GTEST_SKIP() << "no GPU that LibTorch and the kernels can use";
  constexpr int kThreads = 16, kRounds = 20, kShapes = 32;
  std::barrier all_captured(kThreads);
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const OwnStream stream({Device::Kind::cuda, 0});
      const auto twice = [](const std::vector<Tensor>& inputs) { return std::vector<Tensor>{2 * inputs[0]}; };
      for (int round = 0; round < kRounds; ++round) {
        auto replay = std::make_unique<GraphReplay>();
        for (int call = 0; call < 2; ++call) {
          for (int count = 1; count <= kShapes; ++count) {
            const Tensor x = torch::full({count}, call + 1.0, at::kCUDA);
            right += replay->call(twice, {x}, {}).front().equal(2 * x) ? 1 : 0;
          }
        }
        all_captured.arrive_and_wait();
        replay.reset();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads * kRounds * kShapes * 2);
}

// In float64 by LibTorch's operators, also where exponentials of z overflow.
TEST(DecayGate, IsWhatTheReferenceOfTheFusedKernelComputes) {
  constexpr std::int64_t kRows = 6, kHeads = 3;
  for (const auto activation : {DecayActivation::softplus, DecayActivation::sigmoid}) {
    for (const std::int64_t channels : {1, 5}) {
      const std::int64_t columns = kHeads * channels;
      const auto given = [](const Tensor& x) { return x.to(torch::kFloat); };
      const auto z = given(4 * random_tensor({kRows, columns}, 1)), bias = given(random_tensor({columns}, 2));
      const auto a_log = given(random_tensor({kHeads}, 3)), dg = given(random_tensor({kRows, columns}, 4));
      z[0][0] = 2000;
      z[1][1] = -2000;
      const auto wide = [](const Tensor& x) { return x.to(torch::kDouble).requires_grad_(); };
      const auto z_wide = wide(z), bias_wide = wide(bias), a_log_wide = wide(a_log);
      const auto expected = decay_gate(z_wide, bias_wide, a_log_wide, activation, -5.0);
      const auto gradients =
          torch::autograd::grad({expected}, {z_wide, bias_wide, a_log_wide}, {dg.to(torch::kDouble)});

      const RunOptions ref{.implementation = "ref"};
      const auto a = view_of<const float, 2>(z);
      const auto b = view_of<const float, 1>(bias), c = view_of<const float, 1>(a_log);
      const Tensor g = torch::empty({kRows, columns}), dz = torch::empty({kRows, columns});
      const Tensor dbias = torch::empty({columns}), da_log = torch::empty({kHeads});
      decay_gate_forward(DecayGateForward<float>{a, b, c, activation, -5.0F, view_of<float, 2>(g)}, ref);
      decay_gate_backward(
          DecayGateBackward<float>{a, b, c, activation, -5.0F, view_of<const float, 2>(dg), view_of<float, 2>(dz),
                                   view_of<float, 1>(dbias), view_of<float, 1>(da_log)},
          ref);
      EXPECT_TRUE(torch::allclose(g.to(torch::kDouble), expected, 1e-6, 1e-30)) << columns;
      EXPECT_TRUE(torch::allclose(dz.to(torch::kDouble), gradients[0], 1e-6, 1e-12)) << columns;
      EXPECT_TRUE(torch::allclose(dbias.to(torch::kDouble), gradients[1], 1e-6, 1e-12)) << columns;
      EXPECT_TRUE(torch::allclose(da_log.to(torch::kDouble), gradients[2], 1e-6, 1e-12)) << columns;
    }
  }
}

TEST(DecayGate, NamesTheTensorThatIsWrong) {
  const auto z = torch::zeros({2, 6}), bias = torch::zeros({6}), a_log = torch::zeros({3});
  const auto softplus = DecayActivation::softplus;
  test::expect_error([&] { decay_gate({}, bias, a_log, softplus); }, "z", "got an undefined tensor");
  test::expect_error([&] { decay_gate(z, bias.narrow(0, 0, 5), a_log, softplus); }, "bias", "expected shape [6]");
  test::expect_error([&] { decay_gate(z, bias, torch::zeros({4}), softplus); }, "a_log", "that divide the 6 columns");
  test::expect_error([&] { decay_gate(z, bias, torch::zeros({3, 1}), softplus); }, "a_log", "got shape [3, 1]");
}

TEST(Linear, IsLibTorchsProductWithAndWithoutGradientsAndForAnyThreads) {
  const int libtorch_threads = at::get_num_threads();
  for (const int threads : {1, 3}) {
    set_threads(threads);
    for (const int others : {1, 2}) {
      at::set_num_threads(others);
      for (const std::int64_t rows : {1, 8, 9, 300, 600}) {
        const auto x = random_tensor({rows, 2, 24}, 1).to(torch::kFloat).select(1, 1);  // rows further apart than 24
        const auto weight = random_tensor({50, 24}, 2).to(torch::kFloat);
        const auto expected = torch::matmul(x.to(torch::kDouble), weight.to(torch::kDouble).t());
        EXPECT_LE(max_difference(autograd::linear(x, weight), expected), 1e-5) << rows;
        EXPECT_LE(max_difference(autograd::linear(x, weight.t().contiguous().t()), expected), 1e-5)
            << rows << ", transposed";
        const auto a = x.clone().requires_grad_(), b = weight.clone().requires_grad_();
        const auto target = random_tensor({rows, 50}, 3).to(torch::kFloat);
        const auto gradients = torch::autograd::grad({(autograd::linear(a, b) * target).sum()}, {a, b});
        EXPECT_LE(max_difference(gradients[0], torch::matmul(target, weight)), 1e-5);
        EXPECT_LE(max_difference(gradients[1], torch::matmul(target.t(), x)), 1e-4);
      }
    }
  }
  at::set_num_threads(1);
  const auto columns = random_tensor({2, 5, 30}, 1).to(torch::kFloat).narrow(2, 3, 24);
  const auto bias = random_tensor({50}, 3).to(torch::kFloat).requires_grad_();
  const auto x = random_tensor({700, 24}, 1).to(torch::kFloat), weight = random_tensor({50, 24}, 2).to(torch::kFloat);
  const auto biased = autograd::linear(columns, weight, bias);
  EXPECT_LE(max_difference(biased, torch::matmul(columns, weight.t()) + bias), 1e-5);
  EXPECT_LE(max_difference(torch::autograd::grad({biased.sum()}, {bias})[0], torch::full({50}, 10.0)), 1e-5);
  set_threads(1);
  const auto alone = autograd::linear(x, weight);
  set_threads(3);
  EXPECT_TRUE(torch::equal(autograd::linear(x, weight), alone));
  EXPECT_EQ(autograd::linear(x[0], weight).sizes(), at::IntArrayRef({50}));
  EXPECT_THROW(autograd::linear(x, weight.narrow(1, 0, 23)), std::exception);
  set_threads(available_processors());
  at::set_num_threads(libtorch_threads);
}

TEST(Functions, RefuseSecondDerivatives) {
  const auto x = random_tensor({1, 4, 8}, 1).to(torch::kFloat).requires_grad_(true);
  EXPECT_THROW(torch::autograd::grad({rms_norm(x, Tensor()).sum()}, {x}, {}, true, true), std::exception);
}

}  // namespace
}  // namespace efla::autograd
