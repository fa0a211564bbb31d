// The layers' operators as LibTorch functions: values and gradients against tensor operations and float64 references.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <ATen/Parallel.h>

#include <cmath>
#include <functional>
#include <vector>

#include "efla/autograd/layers/add_rms_norm.h"
#include "efla/autograd/layers/decay_gate.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/lookup.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/layers/short_conv.h"
#include "efla/autograd/layers/swiglu.h"
#include "efla/autograd/tensor_view.h"
#include "efla/base/error.h"
#include "efla/ops/layers/add_rms_norm.h"
#include "efla/ops/layers/decay_gate.h"
#include "efla/ops/layers/glu.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"
#include "tests/support/expect_error.h"
#include "tests/support/torch_tensors.h"

namespace efla::autograd {
namespace {

using test::max_difference;
using test::random_tensor;
using torch::Tensor;

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
  const libtorch::Bfloat16OnGpu precision;
  f(3e-2);
}

// Gradients of the functions that differ on a GPU, against LibTorch's operators in float64 on the CPU.
TEST(OnAGpu, MlpsEmbeddingsAndBiasesHaveTheGradientsOfLibTorch) {
  if (!torch::cuda::is_available() || !libtorch::has_gpu_kernels())
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

// In float32, where exp(a_log) overflows and softplus underflows.
TEST(DecayGate, ARateThatOverflowsTimesASoftplusThatUnderflowsIsTheirProduct) {
  const auto leaf = [](std::vector<float> values) { return torch::tensor(values).requires_grad_(); };
  const auto a_log = leaf({89, 100});  // two channels each
  for (const auto& z : {leaf({-200, -92, -103, -97}), leaf({0, -30, 5, -1})}) {
    const auto bias = leaf({0, 1, 0, -1});
    const auto wide = [](const Tensor& x) { return x.detach().to(torch::kDouble); };
    const auto rate = wide(a_log).repeat_interleave(2).exp(), x = wide(z) + wide(bias);
    const auto expected = -rate * torch::log1p(x.exp());
    const auto g = decay_gate(z, bias, a_log, DecayActivation::softplus);
    EXPECT_TRUE(torch::allclose(wide(g.exp()), expected.exp(), 1e-4, 1e-30)) << g;
    const auto gradients = torch::autograd::grad({(g.exp() * torch::arange(1, 5)).sum()}, {z, bias, a_log});
    const auto dz = -rate * torch::sigmoid(x) * expected.exp() * torch::arange(1, 5);
    EXPECT_TRUE(torch::allclose(wide(gradients[0]), dz, 1e-4, 1e-30)) << gradients[0];
    EXPECT_TRUE(torch::allclose(wide(gradients[1]), dz, 1e-4, 1e-30)) << gradients[1];
    EXPECT_TRUE(torch::allclose(wide(gradients[2]), dz.view({2, 2}).sum(1), 1e-4, 1e-30)) << gradients[2];
  }
  const auto z = leaf({-1, 0, 1, 0}), bias = torch::zeros({4});
  const auto g = decay_gate(z, bias, a_log, DecayActivation::sigmoid, -5.0);
  EXPECT_TRUE(g.equal(torch::tensor({0.0, -2.5, -5.0, -2.5}))) << g;
  for (const auto& gradient : torch::autograd::grad({g.sum()}, {z, a_log}))
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
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
