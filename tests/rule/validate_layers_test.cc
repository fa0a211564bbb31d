// Bad problems of the layers' operators: each is named with what was got and what was expected.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "efla/ops/layers/add_rms_norm.h"
#include "efla/ops/layers/cross_entropy.h"
#include "efla/ops/layers/decay_gate.h"
#include "efla/ops/layers/glu.h"
#include "efla/ops/layers/linear.h"
#include "efla/ops/layers/rms_norm.h"
#include "efla/ops/layers/short_conv.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

using test::expect_error;

class ValidateLayers : public testing::Test {
 protected:
  std::vector<float> memory_ = std::vector<float>(64, 1.0F);
  std::vector<std::int8_t> bytes_ = std::vector<std::int8_t>(64, 1);
  std::vector<std::int64_t> targets_ = std::vector<std::int64_t>(64, 1);

  // Return views of the same memory.
  View<float, 1> vector(std::int64_t n) { return View<float, 1>::contiguous(memory_.data(), {n}); }
  View<float, 2> matrix(std::int64_t n, std::int64_t d) { return View<float, 2>::contiguous(memory_.data(), {n, d}); }
  View<float, 3> cube(std::int64_t b, std::int64_t t, std::int64_t d) {
    return View<float, 3>::contiguous(memory_.data(), {b, t, d});
  }
};

constexpr const char* kNothing = "got nothing, expected a tensor of shape [3, 4]";

TEST_F(ValidateLayers, ForgottenViewsOfRmsNorm) {
  const auto x = matrix(3, 4);
  expect_error([&] { rms_norm_forward<float>({x, {}, 1e-6F, {}}); }, "y", kNothing);
  RmsNormBackward<float> p{x, {}, 1e-6F, x, {}, {}};
  expect_error([&] { rms_norm_backward(p); }, "dx", kNothing);
  p.dx = x;
  p.gate = x;
  expect_error([&] { rms_norm_backward(p); }, "dgate", kNothing);
  p.gate = {};
  p.dy = {};
  expect_error([&] { rms_norm_backward(p); }, "dy", kNothing);
}

TEST_F(ValidateLayers, ForgottenViewsOfAddRmsNorm) {
  const auto x = matrix(3, 4);
  expect_error([&] { add_rms_norm_forward<float>({x, {}, vector(4), 1e-6F, {}, {}}); }, "y", kNothing);
  expect_error([&] { add_rms_norm_forward<float>({x, x, vector(4), 1e-6F, {}, x}); }, "sum", kNothing);
  expect_error([&] { add_rms_norm_forward<float>({x, {}, {}, 1e-6F, {}, x}); }, "weight", "got nothing");
  expect_error([&] { add_rms_norm_backward<float>({x, vector(4), 1e-6F, {}, {}, x, {}, vector(4)}); }, "dy", kNothing);
  expect_error([&] { add_rms_norm_backward<float>({x, vector(4), 1e-6F, x, {}, {}, {}, vector(4)}); }, "dx", kNothing);
  expect_error(
      [&] {
        add_rms_norm_backward<float>({x, vector(4), 1e-6F, x, {}, x, {}, {}});
      },
      "dweight", "got nothing, expected a tensor of shape [4]");
}

TEST_F(ValidateLayers, ForgottenViewsOfGlu) {
  const auto x = matrix(3, 4);
  expect_error([&] { glu_forward<float>({x, {}, x}); }, "up", kNothing);
  expect_error([&] { glu_forward<float>({x, x, {}}); }, "y", kNothing);
  expect_error([&] { glu_backward<float>({x, x, {}, x, x}); }, "dy", kNothing);
  expect_error([&] { glu_backward<float>({x, x, x, {}, x}); }, "dgate", kNothing);
  expect_error([&] { glu_backward<float>({x, x, x, x, {}}); }, "dup", kNothing);
}

TEST_F(ValidateLayers, ForgottenViewsOfLinear) {
  LinearForward p{matrix(2, 5), matrix(3, 5), {}};
  expect_error([&] { linear_forward(p); }, "y", "got nothing, expected a tensor of shape [2, 3]");
  p.y = matrix(2, 3);
  p.byte_weight = View<const std::int8_t, 2>::contiguous(bytes_.data(), {3, 5});
  expect_error([&] { linear_forward(p); }, "scales", "got nothing, expected a tensor of shape [3, 1]");
}

TEST_F(ValidateLayers, ForgottenViewsOfShortConv) {
  const auto x = cube(1, 3, 4);
  expect_error(
      [&] {
        short_conv_forward<float>({x, matrix(4, 2), {}});
      },
      "y", "got nothing, expected a tensor of shape [1, 3, 4]");
  expect_error([&] { short_conv_backward<float>({x, matrix(4, 2), x, {}, matrix(4, 2)}); }, "dx", "got nothing");
  expect_error(
      [&] {
        short_conv_backward<float>({x, matrix(4, 2), x, x, {}});
      },
      "dweight", "got nothing, expected a tensor of shape [4, 2]");
}

TEST_F(ValidateLayers, ForgottenViewsOfDecayGate) {
  const auto z = matrix(3, 4);
  DecayGateForward<float> p;
  p.z = z;
  p.bias = vector(4);
  p.a_log = vector(2);
  expect_error([&] { decay_gate_forward(p); }, "g", kNothing);
  p.g = z;
  p.bias = {};
  expect_error([&] { decay_gate_forward(p); }, "bias", "got nothing, expected a tensor of shape [4]");
}

TEST_F(ValidateLayers, ForgottenViewsOfCrossEntropy) {
  CrossEntropy<float> p;
  p.logits = matrix(3, 4);
  p.loss = vector(3);
  expect_error([&] { cross_entropy(p); }, "targets", "got nothing, expected a tensor of shape [3]");
  p.loss = {};
  p.targets = View<const std::int64_t, 1>::contiguous(targets_.data(), {3});
  expect_error([&] { cross_entropy(p); }, "loss", "got nothing, expected a tensor of shape [3]");
}

TEST_F(ValidateLayers, ViewsWithoutElementsNeedNoAddress) {
  View<float, 2> none;
  none.extent = {0, 4};
  EXPECT_NO_THROW(rms_norm_forward<float>({none, vector(4), 1e-6F, none}));
  EXPECT_NO_THROW(glu_forward<float>({none, none, none}));
}

TEST_F(ValidateLayers, NegativeExtents) {
  constexpr const char* expected = "expected a shape without negative extents";
  for (const auto& x : {matrix(3, -4), matrix(-1, 4), matrix(-1, -4)}) {
    expect_error([&] { rms_norm_forward<float>({x, {}, 1e-6F, x}); }, "x", expected);
    expect_error([&] { add_rms_norm_forward<float>({x, {}, vector(4), 1e-6F, {}, x}); }, "x", expected);
    expect_error([&] { glu_forward<float>({x, x, x}); }, "gate", expected);
    DecayGateForward<float> gate;
    gate.z = x;
    expect_error([&] { decay_gate_forward(gate); }, "z", expected);
    expect_error([&] { linear_forward({x, x, x}); }, "x", expected);
    expect_error([&] { cross_entropy<float>({x, {}, {}, {}}); }, "logits", expected);
  }
  expect_error([&] { linear_forward({matrix(2, 5), matrix(-3, 5), matrix(2, -3)}); }, "weight", expected);
  const auto x = cube(-1, 3, 4);
  expect_error(
      [&] {
        short_conv_forward<float>({x, matrix(4, 2), x});
      },
      "x", "got shape [-1, 3, 4], expected a shape without negative extents");
}

}  // namespace
}  // namespace efla
