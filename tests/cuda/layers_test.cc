// RMS normalisation and the short convolution on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "efla/base/error.h"
#include "efla/cuda/layers/add_rms_norm.h"
#include "efla/cuda/layers/cross_entropy.h"
#include "efla/cuda/layers/decay_gate.h"
#include "efla/cuda/layers/glu.h"
#include "efla/cuda/layers/rms_norm.h"
#include "efla/cuda/layers/short_conv.h"
#include "efla/ref/add_rms_norm.h"
#include "efla/ref/cross_entropy.h"
#include "efla/ref/decay_gate.h"
#include "efla/ref/glu.h"
#include "efla/ref/rms_norm.h"
#include "efla/ref/short_conv.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

template <class T>
double tolerance() {
  return sizeof(T) == sizeof(bfloat16) ? 3e-3 : 2e-6;
}
constexpr double kSumTolerance = 2e-6;  // of sums over rows, in float32 for every T

template <class T, int Rank>
void randomise(Tensor<T, Rank>& tensor, Random& random) {
  tensor.assign(drawn(tensor.view().size(), [&] { return random.normal(); }));
}

constexpr GateActivation kActivations[]{GateActivation::silu, GateActivation::sigmoid};
const char* name_of(GateActivation activation) { return activation == GateActivation::silu ? "silu" : "sigmoid"; }

// The tensors of a normalisation: inputs with random numbers, outputs with NaN.
template <class T>
struct NormData {
  Tensor<T, 2> x, dy, y, dx, gate, dgate;
  Tensor<float, 1> weight, dweight;
  GateActivation activation = GateActivation::silu;

  NormData(std::int64_t rows, std::int64_t columns, bool weighted, Layout layout)
      : x({rows, columns}, layout),
        dy({rows, columns}, layout),
        y({rows, columns}, layout),
        dx({rows, columns}, layout) {
    Random random(static_cast<std::uint64_t>(rows + columns));
    randomise(x, random);
    randomise(dy, random);
    if (!weighted) return;
    weight = dweight = Tensor<float, 1>({columns});
    randomise(weight, random);
  }
  void add_gate(GateActivation with, Layout layout) {
    Random random(5);
    gate = dgate = Tensor<T, 2>(x.view().extent, layout);
    randomise(gate, random);
    activation = with;
  }
  RmsNormForward<T> forward() { return {x.view(), weight.view(), kEps, y.view(), gate.view(), activation}; }
  RmsNormBackward<T> backward() {
    return {x.view(), weight.view(), kEps, dy.view(), dx.view(), dweight.view(), gate.view(), activation, dgate.view()};
  }
  static constexpr float kEps = 1e-2F;
};

template <class T>
void run_on_gpu(NormData<T>& data) {
  const DeviceTensor<T, 2> x(data.x), dy(data.dy), y(data.y), dx(data.dx), gate(data.gate), dgate(data.dgate);
  const DeviceTensor<float, 1> weight(data.weight), dweight(data.dweight);
  gpu::rms_norm(RmsNormForward<T>{x.view(), weight.view(), data.kEps, y.view(), gate.view(), data.activation}, nullptr);
  const RmsNormBackward<T> backward{x.view(),       weight.view(), data.kEps,       dy.view(),   dx.view(),
                                    dweight.view(), gate.view(),   data.activation, dgate.view()};
  const PoisonedWorkspace workspace(gpu::rms_norm_workspace_bytes(backward));
  gpu::rms_norm(backward, workspace.get(), nullptr);
  for (const auto* tensor : {&y, &dx, &dgate}) tensor->download();
  dweight.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_norm(const NormData<T>& data) {
  NormData<T> expected(data), got(data), again(data);
  ref::rms_norm(expected.forward());
  ref::rms_norm(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.y.sentinels_intact() && got.dx.sentinels_intact() && got.dweight.sentinels_intact() &&
              got.dgate.sentinels_intact());
  EXPECT_TRUE(got.y.same_bits(again.y) && got.dx.same_bits(again.dx) && got.dweight.same_bits(again.dweight) &&
              got.dgate.same_bits(again.dgate));
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dx.values(), expected.dx.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dgate.values(), expected.dgate.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dweight.values(), expected.dweight.values()).rms, kSumTolerance);
}

template <class T>
void check_norms(std::int64_t rows, std::int64_t columns, bool weighted, Layout layout) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " D " << columns << " weighted " << weighted
                                  << ' ' << name_of(layout));
  NormData<T> data(rows, columns, weighted, layout);
  check_norm(data);
  for (const GateActivation activation : kActivations) {
    SCOPED_TRACE(name_of(activation));
    data.add_gate(activation, layout);
    check_norm(data);
  }
}

void check_rows(std::int64_t rows) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {3, 7, 64, 128, 200, 256, 1000, 1024, 2048, 4096, 8192}) {
      if (rows * columns > (1 << 19)) continue;
      for (const bool weighted : {true, false}) {
        check_norms<float>(rows, columns, weighted, layout);
        check_norms<bfloat16>(rows, columns, weighted, layout);
      }
    }
  }
}

TEST(CudaRmsNorm, FewRowsAgreeWithFloat64) {
  check_rows(1);
  check_rows(33);
}

TEST(CudaRmsNorm, ManyRowsAgreeWithFloat64) { check_rows(2000); }

TEST(CudaRmsNorm, RefusesLongRows) {
  NormData<float> data(1, gpu::kMaxNormColumns + 1, false, Layout::contiguous);
  EXPECT_THROW(gpu::rms_norm(data.forward(), nullptr), Error);
}

template <class T>
struct AddNormData {
  Tensor<float, 2> x, sum, dsum, dx;
  Tensor<T, 2> branch, y, dy, dbranch;
  Tensor<float, 1> weight, dweight;

  AddNormData(std::int64_t rows, std::int64_t columns, bool has_branch, Layout layout)
      : x({rows, columns}, layout),
        dx({rows, columns}, layout),
        y({rows, columns}, layout),
        dy({rows, columns}, layout),
        weight({columns}),
        dweight({columns}) {
    Random random(static_cast<std::uint64_t>(rows + columns));
    randomise(x, random);
    randomise(dy, random);
    randomise(weight, random);
    if (!has_branch) return;
    sum = dsum = Tensor<float, 2>({rows, columns}, layout);
    branch = dbranch = Tensor<T, 2>({rows, columns}, layout);
    randomise(branch, random);
    randomise(dsum, random);
  }
  AddRmsNormForward<T> forward() { return {x.view(), branch.view(), weight.view(), 1e-2F, sum.view(), y.view()}; }
  AddRmsNormBackward<T> backward() {
    return {x.view(), weight.view(), 1e-2F, dy.view(), dsum.view(), dx.view(), dbranch.view(), dweight.view()};
  }
};

template <class T>
void run_on_gpu(AddNormData<T>& data) {
  const DeviceTensor<float, 2> x(data.x), sum(data.sum), dsum(data.dsum), dx(data.dx);
  const DeviceTensor<T, 2> branch(data.branch), y(data.y), dy(data.dy), dbranch(data.dbranch);
  const DeviceTensor<float, 1> weight(data.weight), dweight(data.dweight);
  gpu::add_rms_norm(
      AddRmsNormForward<T>{x.view(), branch.view(), weight.view(), data.forward().eps, sum.view(), y.view()}, nullptr);
  const AddRmsNormBackward<T> backward{x.view(),    weight.view(), data.backward().eps, dy.view(),
                                       dsum.view(), dx.view(),     dbranch.view(),      dweight.view()};
  const PoisonedWorkspace workspace(gpu::add_rms_norm_workspace_bytes(backward));
  gpu::add_rms_norm(backward, workspace.get(), nullptr);
  for (const auto* tensor : {&sum, &dx}) tensor->download();
  for (const auto* tensor : {&y, &dbranch}) tensor->download();
  dweight.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_add_norm(std::int64_t rows, std::int64_t columns, bool has_branch, Layout layout) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " D " << columns << " branch " << has_branch
                                  << ' ' << name_of(layout));
  const AddNormData<T> data(rows, columns, has_branch, layout);
  AddNormData<T> expected(data), got(data), again(data);
  ref::add_rms_norm(expected.forward());
  ref::add_rms_norm(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.sum.sentinels_intact() && got.y.sentinels_intact() && got.dx.sentinels_intact() &&
              got.dbranch.sentinels_intact() && got.dweight.sentinels_intact());
  EXPECT_TRUE(got.sum.same_bits(again.sum) && got.y.same_bits(again.y) && got.dx.same_bits(again.dx) &&
              got.dbranch.same_bits(again.dbranch) && got.dweight.same_bits(again.dweight));
  EXPECT_LE(distance(got.sum.values(), expected.sum.values()).rms, tolerance<float>());
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dx.values(), expected.dx.values()).rms, tolerance<float>());
  EXPECT_LE(distance(got.dbranch.values(), expected.dbranch.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dweight.values(), expected.dweight.values()).rms, kSumTolerance);
}

TEST(CudaAddRmsNorm, AgreesWithFloat64) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {3, 64, 200, 256, 1000, 1024, 2048, 4096, 8192}) {
      for (const std::int64_t rows : {1, 33, 3000}) {
        if (rows * columns > (1 << 20)) continue;
        for (const bool has_branch : {true, false}) {
          check_add_norm<float>(rows, columns, has_branch, layout);
          check_add_norm<bfloat16>(rows, columns, has_branch, layout);
        }
      }
    }
  }
}

template <class T>
void check_cross_entropy(std::int64_t rows, std::int64_t columns, bool gradient, Layout layout) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " V " << columns << " gradient " << gradient
                                  << ' ' << name_of(layout));
  Tensor<T, 2> logits({rows, columns}, layout);
  Random random(static_cast<std::uint64_t>(rows + columns));
  logits.assign(drawn(logits.view().size(), [&] { return 300 + 10 * random.normal(); }));
  std::vector<std::int64_t> targets;
  for (std::int64_t n = 0; n < rows; ++n) targets.push_back(n % 3 == 1 ? kIgnoreIndex : n * n % columns);
  const DeviceBytes targets_there(targets.size() * sizeof(std::int64_t));
  gpu::check(cudaMemcpy(targets_there.data(), targets.data(), targets_there.bytes(), cudaMemcpyHostToDevice),
             "cudaMemcpy");
  const auto targets_at = [&](const void* data) {
    return View<const std::int64_t, 1>::contiguous(static_cast<const std::int64_t*>(data), {rows});
  };
  Tensor<float, 1> share, loss({rows});
  if (gradient) (share = Tensor<float, 1>({1})).view()(0) = 0.25F;
  Tensor<T, 2> expected(logits);
  Tensor<float, 1> expected_loss(loss);
  ref::cross_entropy(CrossEntropy<T>{expected.view(), targets_at(targets.data()), share.view(), expected_loss.view()});
  const DeviceTensor<T, 2> a(logits);
  const DeviceTensor<float, 1> b(share), c(loss);
  gpu::cross_entropy(CrossEntropy<T>{a.view(), targets_at(targets_there.data()), b.view(), c.view()}, nullptr);
  a.download();
  c.download();
  EXPECT_TRUE(logits.sentinels_intact() && loss.sentinels_intact());
  EXPECT_LE(distance(logits.values(), expected.values()).rms, tolerance<T>());
  for (std::int64_t n = 0; n < rows; ++n) EXPECT_NEAR(loss.view()(n), expected_loss.view()(n), 1e-4) << n;
}

TEST(CudaCrossEntropy, AgreesWithFloat64) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {1, 7, 256, 1000, 32000}) {
      for (const bool gradient : {true, false}) {
        check_cross_entropy<float>(33, columns, gradient, layout);
        check_cross_entropy<bfloat16>(33, columns, gradient, layout);
      }
    }
  }
}

template <class T>
void check_glu(std::int64_t rows, std::int64_t columns, Layout layout, GateActivation activation) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " D " << columns << ' ' << name_of(layout)
                                  << ' ' << name_of(activation));
  Tensor<T, 2> gate({rows, columns}, layout), up(gate), dy(gate);
  Random random(static_cast<std::uint64_t>(rows + columns));
  for (auto* tensor : {&gate, &up, &dy}) randomise(*tensor, random);
  gate.view()(0, 0) = from_state<T>(-200.0F);
  gate.view()(rows - 1, columns - 1) = from_state<T>(200.0F);
  Tensor<T, 2> y({rows, columns}, layout), dgate(y), dup(y), expected_y(y), expected_dgate(y), expected_dup(y);
  ref::glu(GluForward<T>{gate.view(), up.view(), expected_y.view(), activation});
  ref::glu(
      GluBackward<T>{gate.view(), up.view(), dy.view(), expected_dgate.view(), expected_dup.view(), {}, activation});
  const DeviceTensor<T, 2> a(gate), b(up), c(dy), d(y), e(dgate), f(dup);
  gpu::glu(GluForward<T>{a.view(), b.view(), d.view(), activation}, nullptr);
  gpu::glu(GluBackward<T>{a.view(), b.view(), c.view(), e.view(), f.view(), {}, activation}, nullptr);
  for (const auto* tensor : {&d, &e, &f}) tensor->download();
  Tensor<T, 2> again({rows, columns}, layout);
  const DeviceTensor<T, 2> h(again);
  gpu::glu(GluBackward<T>{a.view(), b.view(), c.view(), e.view(), f.view(), h.view(), activation}, nullptr);
  h.download();
  EXPECT_TRUE(again.same_bits(y));
  EXPECT_TRUE(y.sentinels_intact() && dgate.sentinels_intact() && dup.sentinels_intact() && again.sentinels_intact());
  EXPECT_LE(distance(y.values(), expected_y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(dgate.values(), expected_dgate.values()).rms, tolerance<T>());
  EXPECT_LE(distance(dup.values(), expected_dup.values()).rms, tolerance<T>());
}

TEST(CudaGlu, AgreesWithFloat64) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t columns : {1, 3, 64, 200, 2816}) {
      for (const std::int64_t rows : {1, 33, 300}) {
        for (const auto activation : kActivations) {
          check_glu<float>(rows, columns, layout, activation);
          check_glu<bfloat16>(rows, columns, layout, activation);
        }
      }
    }
  }
}

// The tensors of a decay gate: inputs with random numbers, outputs with NaN. Means of x and of dg that are not 0 keep
// the sums over rows from cancelling.
template <class T>
struct DecayGateData {
  Tensor<T, 2> z, dz;
  Tensor<float, 2> g, dg;
  Tensor<float, 1> bias, a_log, dbias, da_log;
  DecayActivation activation;

  DecayGateData(std::int64_t rows, std::int64_t heads, std::int64_t channels, Layout layout, DecayActivation with)
      : z({rows, heads * channels}, layout),
        dz(z),
        g({rows, heads * channels}, layout),
        dg(g),
        bias({heads * channels}),
        a_log({heads}),
        dbias(bias),
        da_log(a_log),
        activation(with) {
    Random random(static_cast<std::uint64_t>(rows + heads + channels));
    randomise(z, random);
    a_log.assign(drawn(heads, [&] { return 0.5 * random.normal(); }));
    bias.assign(drawn(bias.view().size(), [&] { return 1.5 + 0.5 * random.normal(); }));
    dg.assign(drawn(dg.view().size(), [&] { return 1 + random.normal(); }));
  }
  DecayGateForward<T> forward() { return {z.view(), bias.view(), a_log.view(), activation, kBound, g.view()}; }
  DecayGateBackward<T> backward() {
    return {z.view(), bias.view(), a_log.view(), activation, kBound, dg.view(), dz.view(), dbias.view(), da_log.view()};
  }
  static constexpr float kBound = -5;
};

template <class T>
void run_on_gpu(DecayGateData<T>& data) {
  const DeviceTensor<T, 2> z(data.z), dz(data.dz);
  const DeviceTensor<float, 2> g(data.g), dg(data.dg);
  const DeviceTensor<float, 1> bias(data.bias), a_log(data.a_log), dbias(data.dbias), da_log(data.da_log);
  const DecayGateForward<T> forward{z.view(), bias.view(), a_log.view(), data.activation, data.kBound, g.view()};
  const DecayGateBackward<T> backward{z.view(),  bias.view(), a_log.view(), data.activation, data.kBound,
                                      dg.view(), dz.view(),   dbias.view(), da_log.view()};
  const PoisonedWorkspace workspace(gpu::decay_gate_workspace_bytes(backward));
  replay_in_graph([&](cudaStream_t stream) {
    gpu::decay_gate(forward, stream);
    gpu::decay_gate(backward, workspace.get(), stream);
  });
  for (const auto* tensor : {&dbias, &da_log}) tensor->download();
  dz.download();
  g.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_decay_gate(const DecayGateData<T>& data) {
  DecayGateData<T> expected(data), got(data), again(data);
  ref::decay_gate(expected.forward());
  ref::decay_gate(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.g.sentinels_intact() && got.dz.sentinels_intact() && got.dbias.sentinels_intact() &&
              got.da_log.sentinels_intact());
  EXPECT_TRUE(got.g.same_bits(again.g) && got.dz.same_bits(again.dz) && got.dbias.same_bits(again.dbias) &&
              got.da_log.same_bits(again.da_log));
  EXPECT_LE(distance(got.g.values(), expected.g.values()).rms, tolerance<float>());
  EXPECT_LE(distance(got.dz.values(), expected.dz.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dbias.values(), expected.dbias.values()).rms, kSumTolerance);
  EXPECT_LE(distance(got.da_log.values(), expected.da_log.values()).rms, kSumTolerance);
}

constexpr DecayActivation kDecayActivations[]{DecayActivation::softplus, DecayActivation::sigmoid};
const char* name_of(DecayActivation activation) {
  return activation == DecayActivation::softplus ? "softplus" : "sigmoid";
}

template <class T>
void check_decay_gates(std::int64_t rows, std::int64_t heads, std::int64_t channels) {
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const auto activation : kDecayActivations) {
      SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " N " << rows << " HV " << heads << " C " << channels
                                      << ' ' << name_of(layout) << ' ' << name_of(activation));
      check_decay_gate(DecayGateData<T>(rows, heads, channels, layout, activation));
    }
  }
}

TEST(CudaDecayGate, AgreesWithFloat64) {
  for (const std::int64_t heads : {1, 3, 8, 24}) {
    for (const std::int64_t channels : {1, 2, 5, 50, 64, 128}) {
      for (const std::int64_t rows : {1, 33, 1000}) {
        check_decay_gates<float>(rows, heads, channels);
        check_decay_gates<bfloat16>(rows, heads, channels);
      }
    }
  }
  check_decay_gates<bfloat16>(20000, 8, 1);
}

// Element by element, where exponentials of x would overflow or lose digits.
TEST(CudaDecayGate, IsExactAtTheLimits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<double> ends{-kInfinity, -1e30, -300, -90, -30, -17, -8,   -1e-6,     0,
                                 1e-6,       8,     17,   30,  90,  300, 1e30, kInfinity, NAN};
  for (const auto activation : kDecayActivations) {
    DecayGateData<float> got(1, 1, static_cast<std::int64_t>(ends.size()), Layout::contiguous, activation);
    got.z.assign(ends);
    got.bias.assign(std::vector<double>(ends.size(), 0));
    got.a_log.assign({0});  // rate is 1, whose rounding errors an exponential would multiply
    DecayGateData<float> expected(got);
    ref::decay_gate(expected.forward());
    ref::decay_gate(expected.backward());
    run_on_gpu(got);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const auto check = [&](double value, double right) {
        SCOPED_TRACE(testing::Message() << name_of(activation) << ' ' << ends[i]);
        if (!std::isfinite(right)) {
          EXPECT_TRUE(value == right || (std::isnan(value) && std::isnan(right))) << value << ' ' << right;
        } else {
          EXPECT_NEAR(value, right, 2e-6 * std::abs(right) + 1e-37);
        }
      };
      const auto d = static_cast<std::int64_t>(i);
      check(got.g.view()(0, d), expected.g.view()(0, d));
      check(got.dz.view()(0, d), expected.dz.view()(0, d));
    }
  }
}

// Rates whose exponential overflows, beside softplus that underflow.
TEST(CudaDecayGate, ARateThatOverflowsTimesASoftplusThatUnderflowsIsTheirProduct) {
  const std::vector<double> z{-300, -104, -100, -89, -30, -1, 0, 1};
  for (const auto activation : kDecayActivations) {
    for (const float a_log : {89.0F, 100.0F}) {
      DecayGateData<float> got(1, 1, static_cast<std::int64_t>(z.size()), Layout::contiguous, activation);
      got.z.assign(z);
      got.bias.assign(std::vector<double>(z.size(), 0));
      got.a_log.assign({a_log});
      DecayGateData<float> expected(got);
      ref::decay_gate(expected.forward());
      run_on_gpu(got);
      const bool softplus = activation == DecayActivation::softplus;
      for (std::int64_t d = 0; d < std::ssize(z); ++d) {
        SCOPED_TRACE(testing::Message() << name_of(activation) << ' ' << a_log << ' ' << z[d]);
        const float g = got.g.view()(0, d), right = expected.g.view()(0, d), dz = got.dz.view()(0, d);
        EXPECT_NEAR(std::exp(g), std::exp(right), 2e-6);
        EXPECT_TRUE(std::isfinite(dz));
        if (softplus && z[d] < -20 - (a_log - 60)) {
          EXPECT_NEAR(g, right, 2e-5 * std::abs(right) + 1e-37);
          EXPECT_NEAR(dz, right * expected.dg.view()(0, d), 2e-5 * std::abs(dz) + 1e-37);
        }
      }
      EXPECT_TRUE(std::isfinite(got.da_log.view()(0)));
    }
  }
}

struct ConvCase {
  std::int64_t batch = 1, tokens = 1, channels = 1, width = 4;
  Layout layout = Layout::contiguous;
  std::vector<std::int64_t> cu_seqlens = {};
};

template <class T>
struct ConvData {
  Tensor<T, 3> x, dy, y, dx;
  Tensor<float, 2> weight, dweight;
  std::vector<std::int64_t> cu_seqlens;

  explicit ConvData(const ConvCase& c)
      : x({c.batch, c.tokens, c.channels}, c.layout),
        dy({c.batch, c.tokens, c.channels}, c.layout),
        y({c.batch, c.tokens, c.channels}, c.layout),
        dx({c.batch, c.tokens, c.channels}, c.layout),
        weight({c.channels, c.width}),
        dweight({c.channels, c.width}),
        cu_seqlens(c.cu_seqlens) {
    Random random(static_cast<std::uint64_t>(c.tokens + c.channels));
    randomise(x, random);
    randomise(dy, random);
    randomise(weight, random);
  }
  View<const std::int64_t, 1> ends(const std::int64_t* data) const {
    if (cu_seqlens.empty()) return {};
    return View<const std::int64_t, 1>::contiguous(data, {static_cast<std::int64_t>(cu_seqlens.size())});
  }
  ShortConvForward<T> forward() { return {x.view(), weight.view(), y.view(), ends(cu_seqlens.data())}; }
  ShortConvBackward<T> backward() {
    return {x.view(), weight.view(), dy.view(), dx.view(), dweight.view(), ends(cu_seqlens.data())};
  }
};

template <class T>
void run_on_gpu(ConvData<T>& data) {
  const DeviceTensor<T, 3> x(data.x), dy(data.dy), y(data.y), dx(data.dx);
  const DeviceTensor<float, 2> weight(data.weight), dweight(data.dweight);
  const DeviceBytes memory(data.cu_seqlens.size() * sizeof(std::int64_t));
  if (memory.bytes() > 0) {
    gpu::check(cudaMemcpy(memory.data(), data.cu_seqlens.data(), memory.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  const auto ends = data.ends(static_cast<const std::int64_t*>(memory.data()));
  gpu::short_conv(ShortConvForward<T>{x.view(), weight.view(), y.view(), ends}, nullptr);
  const ShortConvBackward<T> backward{x.view(), weight.view(), dy.view(), dx.view(), dweight.view(), ends};
  const PoisonedWorkspace workspace(gpu::short_conv_workspace_bytes(backward));
  gpu::short_conv(backward, workspace.get(), nullptr);
  y.download();
  dx.download();
  dweight.download();
  EXPECT_TRUE(workspace.guards_intact());
}

template <class T>
void check_conv(const ConvCase& c) {
  SCOPED_TRACE(testing::Message() << DTypeOf<T>::name << " B " << c.batch << " T " << c.tokens << " D " << c.channels
                                  << " W " << c.width << ' ' << name_of(c.layout) << " packed " << c.cu_seqlens.size());
  ConvData<T> expected(c), got(c), again(c);
  ref::short_conv(expected.forward());
  ref::short_conv(expected.backward());
  run_on_gpu(got);
  run_on_gpu(again);
  EXPECT_TRUE(got.y.sentinels_intact() && got.dx.sentinels_intact() && got.dweight.sentinels_intact());
  EXPECT_TRUE(got.y.same_bits(again.y) && got.dx.same_bits(again.dx) && got.dweight.same_bits(again.dweight));
  EXPECT_LE(distance(got.y.values(), expected.y.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dx.values(), expected.dx.values()).rms, tolerance<T>());
  EXPECT_LE(distance(got.dweight.values(), expected.dweight.values()).rms, kSumTolerance);
}

std::vector<ConvCase> conv_cases() {
  std::vector<ConvCase> cases;
  for (const Layout layout : {Layout::contiguous, Layout::sliced}) {
    for (const std::int64_t width : {1, 2, 3, 4, 5, 8}) {
      for (const std::int64_t channels : {3, 8, 45, 320}) {
        for (const std::int64_t tokens : {1, 2, 15, 17, 128, 300})
          cases.push_back({2, tokens, channels, width, layout});
      }
      for (const std::int64_t channels : {45, 320}) {
        cases.push_back({1, 150, channels, width, layout, {0, 3, 3, 16, 17, 18, 19, 20, 45, 128, 150, 150}});
        cases.push_back({1, 40, channels, width, layout, {0, 0, 40}});
      }
    }
  }
  return cases;
}

TEST(CudaShortConv, AgreesWithFloat64) {
  for (const ConvCase& c : conv_cases()) {
    check_conv<float>(c);
    check_conv<bfloat16>(c);
  }
}

TEST(CudaShortConv, NanStaysWithinItsTaps) {
  const ConvCase c{1, 64, 64, 3, Layout::contiguous, {0, 20, 64}};
  constexpr std::int64_t kTokens[] = {18, 19, 40};
  ConvData<bfloat16> data(c);
  for (const std::int64_t t : kTokens) data.x.view()(0, t, 5) = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  run_on_gpu(data);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t d = 0; d < c.channels; ++d) {
      const bool reached = d == 5 && (t == 18 || t == 19 || (t >= 40 && t < 43));
      const bool reached_back = d == 5 && ((t >= 16 && t < 20) || (t >= 38 && t < 43));
      EXPECT_EQ(std::isnan(to_float(data.y.view()(0, t, d))), reached) << t << ' ' << d;
      EXPECT_EQ(std::isnan(to_float(data.dx.view()(0, t, d))), reached_back) << t << ' ' << d;
    }
  }
}

}  // namespace
}  // namespace efla::test
