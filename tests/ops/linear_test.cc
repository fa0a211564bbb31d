// Every implementation of a linear layer against float64, on every SIMD target of this machine.
#include "efla/ops/layers/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "efla/cpu/common/target.h"
#include "efla/ops/layers/rms_norm.h"
#include "tests/support/delta_run.h"
#include "tests/support/expect_error.h"

namespace efla {
namespace {

constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kGap = 3;  // floats between two rows, which nothing may read or write

struct Matrix {
  std::vector<float> data;
  std::int64_t rows, columns;

  Matrix(std::int64_t n, std::int64_t d) : data(n * (d + kGap), kUnwritten), rows(n), columns(d) {}
  Matrix(std::int64_t n, std::int64_t d, Random& random) : Matrix(n, d) {
    for (std::int64_t r = 0; r < n; ++r) {
      for (std::int64_t c = 0; c < d; ++c) at(r, c) = static_cast<float>(random.normal());
    }
  }
  float& at(std::int64_t r, std::int64_t c) { return data[r * (columns + kGap) + c]; }
  View<float, 2> view() { return {data.data(), {rows, columns}, {columns + kGap, 1}}; }
  View<const float, 2> const_view() { return {data.data(), {rows, columns}, {columns + kGap, 1}}; }
};

// The type in which a weight is stored, and the weight in that type. pairs: bfloat16, and x may be rounded to it.
enum class Stored { float32, bfloat16, pairs, int8 };

struct Weight {
  Stored stored;
  Matrix exact;  // the values after storing
  std::vector<bfloat16> narrow;
  std::vector<std::int8_t> bytes;
  std::vector<float> scales;

  Weight(Stored type, std::int64_t n, std::int64_t d, Random& random) : stored(type), exact(n, d, random) {
    const std::int64_t blocks = (d + kScaleBlock - 1) / kScaleBlock;
    if (type == Stored::int8) {
      for (std::int64_t i = 0; i < n * blocks; ++i) scales.push_back(0.01F + static_cast<float>(random.uniform()));
    }
    for (std::int64_t r = 0; r < n && type != Stored::float32; ++r) {
      for (std::int64_t c = 0; c < d; ++c) {
        if (type != Stored::int8) {
          narrow.push_back(to_bfloat16(exact.at(r, c)));
          exact.at(r, c) = to_float(narrow.back());
        } else {
          bytes.push_back(static_cast<std::int8_t>(127.0 * random.uniform(-1.0, 1.0)));
          exact.at(r, c) = static_cast<float>(bytes.back()) * scales[r * blocks + c / kScaleBlock];
        }
      }
    }
  }

  LinearForward problem(Matrix& x, Matrix& y) {
    const std::int64_t n = exact.rows, d = exact.columns;
    LinearForward p{x.const_view(), {}, y.view()};
    if (stored == Stored::float32) p.weight = exact.const_view();
    if (!narrow.empty()) p.narrow_weight = View<const bfloat16, 2>::contiguous(narrow.data(), {n, d});
    p.rounds_x = stored == Stored::pairs;
    if (stored == Stored::int8) {
      p.byte_weight = View<const std::int8_t, 2>::contiguous(bytes.data(), {n, d});
      p.scales = View<const float, 2>::contiguous(scales.data(), {n, (d + kScaleBlock - 1) / kScaleBlock});
    }
    return p;
  }
};

Matrix product(Matrix& x, Weight& weight, int threads, const std::string& implementation = "auto") {
  Matrix y(x.rows, weight.exact.rows);
  ThreadPool pool(threads);
  linear_forward(weight.problem(x, y), {implementation, {.pool = &pool}});
  return y;
}

// A weight of random blocks, and its numbers.
struct QuantWeight {
  std::vector<std::byte> blocks;
  QuantMatrix matrix;
  Matrix exact;

  QuantWeight(QuantType type, std::int64_t n, std::int64_t d, Random& random) : exact(n, d) {
    matrix = {type, nullptr, n, d};
    const std::int64_t size = layout_of(type).bytes;
    for (std::int64_t i = 0; i < n * matrix.row_bytes(); ++i) {
      blocks.push_back(static_cast<std::byte>(random.uniform(0.0, 256.0)));
    }
    matrix.data = blocks.data();
    for (std::int64_t block = 0; block < n * matrix.row_bytes(); block += size) {
      // The upper byte of each float16, so that it is between 2⁻⁷ and 2⁻⁵.
      const auto set_half = [&](std::int64_t at) {
        blocks[block + at + 1] = static_cast<std::byte>(0x20 + static_cast<int>(random.uniform(0.0, 8.0)));
      };
      set_half(type == QuantType::q6_k ? 208 : 0);
      if (type == QuantType::q4_k || type == QuantType::q5_k) set_half(2);
    }
    for (std::int64_t r = 0; r < n; ++r) dequantise_row(matrix, r, &exact.at(r, 0));
  }

  Matrix product(Matrix& x, bool rounds_x, int threads) const {
    Matrix y(x.rows, matrix.rows);
    LinearForward p{x.const_view(), {}, y.view()};
    p.quant_weight = matrix;
    p.rounds_x = rounds_x;
    ThreadPool pool(threads);
    linear_forward(p, {"simd", {.pool = &pool}});
    return y;
  }
};

class LinearOnTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { cpu::use_target(GetParam()); }
  void TearDown() override { cpu::use_target(""); }
};

TEST_P(LinearOnTarget, IsTheFloat64Product) {
  Random random(7);
  for (const auto stored : {Stored::float32, Stored::bfloat16, Stored::pairs, Stored::int8}) {
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 21}) {
      for (const std::int64_t n : {1, 3, 9, 130}) {
        for (const std::int64_t d : {1, 7, 16, 100, 384, 1100}) {
          Matrix x(rows, d, random);
          Weight weight(stored, n, d, random);
          for (const std::string implementation : {"simd", "ref"}) {
            Matrix y = product(x, weight, 2, implementation);
            const bool rounds = stored == Stored::pairs && implementation == "simd" && cpu::uses_bfloat16();
            const auto x_at = [&](std::int64_t r, std::int64_t i) -> double {
              return rounds ? to_float(to_bfloat16(x.at(r, i))) : x.at(r, i);
            };
            for (std::int64_t r = 0; r < rows; ++r) {
              for (std::int64_t c = 0; c < n; ++c) {
                double expected = 0.0, size = 0.0;
                for (std::int64_t i = 0; i < d; ++i) {
                  const double term = x_at(r, i) * weight.exact.at(c, i);
                  expected += term;
                  size += std::abs(term);
                }
                ASSERT_LE(std::abs(y.at(r, c) - expected), 1e-6 * size) << rows << " " << n << " " << d;
              }
              for (std::int64_t gap = 0; gap < kGap; ++gap) ASSERT_TRUE(std::isnan(y.at(r, n + gap)));
            }
          }
        }
      }
    }
  }
}

TEST_P(LinearOnTarget, ARowHasTheSameBitsWhateverIsBesideItAndForAnyNumberOfThreads) {
  Random random(8);
  using Shape = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [stored, shape] : {std::pair{Stored::float32, Shape{317, 203}},
                                      {Stored::bfloat16, {317, 203}},
                                      {Stored::pairs, {317, 203}},
                                      {Stored::int8, {317, 203}},
                                      // columns of which many rows go through some at a time, and enough
                                      // bytes that few rows go through one row of the weight after another
                                      {Stored::float32, {130, 2115}},
                                      {Stored::bfloat16, {101, 1027}},
                                      {Stored::pairs, {130, 4227}},
                                      {Stored::int8, {960, 1100}}}) {
    const auto [n, d] = shape;
    Weight weight(stored, n, d, random);
    for (const std::int64_t rows : {2, 3, 4, 5, 6, 7, 8, 9, 33, 150}) {  // enough to be distributed in both ways
      Matrix x(rows, d, random), all = product(x, weight, 1), threaded = product(x, weight, 3);
      for (std::int64_t r = 0; r<rows; r += rows> 40 ? 13 : 1) {
        Matrix row(1, d);
        for (std::int64_t c = 0; c < d; ++c) row.at(0, c) = x.at(r, c);
        Matrix alone = product(row, weight, 2);
        for (std::int64_t c = 0; c < n; ++c) {
          ASSERT_EQ(alone.at(0, c), all.at(r, c)) << rows;
          ASSERT_EQ(threaded.at(r, c), all.at(r, c)) << rows;
        }
      }
    }
  }
}

// The numbers of blocks and x have a relative error of at most 2⁻⁹ each after they are rounded to bfloat16. Sums in
// float32 and the difference of a scaled number and a minimum add little.
TEST_P(LinearOnTarget, IsTheFloat64ProductOfTheNumbersOfBlocks) {
  Random random(13);
  for (const auto type : kQuantTypes) {
    for (const bool rounds : {false, true}) {
      for (const std::int64_t rows : {1, 2, 3, 5, 8, 21}) {
        for (const std::int64_t n : {1, 9, 130}) {
          for (const std::int64_t d : {3 * layout_of(type).elements, std::int64_t{1024}}) {
            Matrix x(rows, d, random);
            QuantWeight weight(type, n, d, random);
            Matrix y = weight.product(x, rounds, 2);
            const double error = rounds && cpu::uses_bfloat16() ? 0x1.01p-8 : 1e-6;
            for (std::int64_t r = 0; r < rows; ++r) {
              for (std::int64_t c = 0; c < n; ++c) {
                double expected = 0.0, size = 0.0, inputs = 0.0;
                for (std::int64_t i = 0; i < d; ++i) {
                  const double term = static_cast<double>(x.at(r, i)) * weight.exact.at(c, i);
                  expected += term;
                  size += std::abs(term);
                  inputs += std::abs(x.at(r, i));
                }
                ASSERT_LE(std::abs(y.at(r, c) - expected), error * size + 1e-6 * inputs)
                    << static_cast<int>(type) << " " << rows << " " << n << " " << d;
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(LinearOnTarget, ARowHasTheSameBitsWithBlocks) {
  Random random(14);
  for (const auto type : kQuantTypes) {
    QuantWeight weight(type, 130, 768, random);
    for (const std::int64_t rows : {2, 3, 4, 5, 7, 8, 9, 33, 300}) {
      Matrix x(rows, 768, random), all = weight.product(x, true, 1), threaded = weight.product(x, true, 3);
      for (std::int64_t r = 0; r<rows; r += rows> 40 ? 37 : 1) {
        Matrix row(1, 768);
        for (std::int64_t c = 0; c < 768; ++c) row.at(0, c) = x.at(r, c);
        Matrix alone = weight.product(row, true, 2);
        for (std::int64_t c = 0; c < 130; ++c) {
          ASSERT_EQ(alone.at(0, c), all.at(r, c)) << rows;
          ASSERT_EQ(threaded.at(r, c), all.at(r, c)) << rows;
        }
      }
    }
  }
}

// Numbers computed by hand from the description of each type.
TEST(QuantBlock, HasTheNumbersOfItsBits) {
  std::array<std::uint8_t, 210> block{};
  std::array<float, 256> numbers;
  const auto compute = [&](QuantType type) {
    dequantise(type, reinterpret_cast<const std::byte*>(block.data()), numbers.data());
  };
  block = {0x00, 0x38, 0x05, 0xfe};  // scale 1/2
  compute(QuantType::q8_0);
  EXPECT_EQ(numbers[0], 2.5F);
  EXPECT_EQ(numbers[1], -1.0F);
  block = {0x00, 0x38, 0xf1};
  compute(QuantType::q4_0);
  EXPECT_EQ(numbers[0], -3.5F);
  EXPECT_EQ(numbers[16], 3.5F);
  compute(QuantType::iq4_nl);
  EXPECT_EQ(numbers[0], -52.0F);
  EXPECT_EQ(numbers[16], 56.5F);

  block = {0x00, 0x38, 0x00, 0x3c};  // scale 1/2, minimum 1
  block[4] = 0xc3;                   // scale of part 0: 3; upper bits of the scale of part 4
  block[8] = 0x41;                   // minimum of part 0: 1; upper bits of the minimum of part 4
  block[12] = 0x52;                  // lower bits of part 4: scale 2, minimum 5
  block[16] = 0x07;                  // part 0, number 0
  block[16 + 64 + 1] = 0x0f;         // part 4, number 1
  compute(QuantType::q4_k);
  EXPECT_EQ(numbers[0], 0.5F * 3 * 7 - 1);
  EXPECT_EQ(numbers[4 * 32 + 1], 0.5F * (48 + 2) * 15 - (16 + 5));
  std::copy_backward(block.begin() + 16, block.begin() + 144, block.begin() + 176);
  std::fill_n(block.begin() + 16, 32, std::uint8_t{0});
  block[16] = 0x01;      // fifth bit of number 0 of part 0
  block[16 + 1] = 0x10;  // and of number 1 of part 4
  compute(QuantType::q5_k);
  EXPECT_EQ(numbers[0], 0.5F * 3 * (16 + 7) - 1);
  EXPECT_EQ(numbers[4 * 32 + 1], 0.5F * (48 + 2) * (16 + 15) - (16 + 5));

  block = {};
  block[209] = 0x38;           // scale 1/2
  block[64 + 3] = 0x90;        // upper four bits: half 1, part 2, number 3
  block[128 + 32 + 3] = 0x20;  // and their bits 4 and 5
  block[192 + 12] = 0xfe;      // its scale −2
  compute(QuantType::q6_k);
  EXPECT_EQ(numbers[6 * 32 + 3], 0.5F * -2 * ((32 + 9) - 32));
}

TEST_P(LinearOnTarget, SeveralProblemsHaveTheBitsOfACallForEach) {
  struct Case {
    Matrix x;
    Weight weight;
  };
  for (const std::int64_t rows : {1, 8, 40}) {
    for (const std::int64_t d : {5, 203}) {  // few and many products
      Random random(11);
      std::vector<Case> cases;
      for (const auto stored : {Stored::float32, Stored::pairs, Stored::int8, Stored::bfloat16, Stored::float32}) {
        const auto i = static_cast<std::int64_t>(cases.size());
        cases.push_back({Matrix(i == 2 ? rows + 1 : rows, d, random), Weight(stored, i == 1 ? 2 : 160 + i, d, random)});
      }
      cases.push_back({Matrix(0, d, random), Weight(Stored::float32, 7, d, random)});
      for (const int threads : {1, 3}) {
        std::vector<Matrix> outputs;
        for (const auto& one : cases) outputs.emplace_back(one.x.rows, one.weight.exact.rows);
        std::vector<LinearForward> problems;
        for (std::size_t i = 0; i < cases.size(); ++i) {
          problems.push_back(cases[i].weight.problem(cases[i].x, outputs[i]));
        }
        ThreadPool pool(threads);
        linear_forward(problems, {"auto", {.pool = &pool}});
        for (std::size_t i = 0; i < cases.size(); ++i) {
          Matrix alone = product(cases[i].x, cases[i].weight, threads);
          for (std::int64_t r = 0; r < alone.rows; ++r) {
            for (std::int64_t c = 0; c < alone.columns; ++c) ASSERT_EQ(outputs[i].at(r, c), alone.at(r, c)) << i;
            for (std::int64_t gap = 0; gap < kGap; ++gap) {
              ASSERT_TRUE(std::isnan(outputs[i].at(r, alone.columns + gap))) << i;
            }
          }
        }
      }
    }
  }
}

TEST(Linear, ComputesNoneOfSeveralProblemsIfOneIsRefused) {
  Random random(12);
  Matrix x(2, 4, random), weight(6, 4, random), y(2, 6), fused(2, 3);
  std::vector<LinearForward> problems{{x.const_view(), weight.const_view(), y.view()},
                                      {x.const_view(), weight.const_view(), fused.view()}};
  problems[1].swiglu = true;
  test::expect_error([&] { linear_forward(problems); }, "implementation", "auto");
  EXPECT_TRUE(std::isnan(y.at(0, 0)));
  linear_forward(problems, {"ref"});
  EXPECT_FALSE(std::isnan(y.at(0, 0)));
  EXPECT_FALSE(std::isnan(fused.at(1, 2)));
}

TEST(Linear, TheReferenceHasWhatStandsBeforeAndAfterTheProduct) {
  Random random(10);
  const std::int64_t rows = 3, d = 40, n = 14;
  Matrix x(rows, d, random), normed(rows, d), weight(n, d, random), products(rows, n), residual(rows, n / 2, random),
      y(rows, n / 2);
  std::vector<float> norm(d);
  for (auto& value : norm) value = static_cast<float>(random.normal());
  LinearForward p{x.const_view(), weight.const_view(), y.view()};
  p.norm_weight = View<const float, 1>::contiguous(norm.data(), {d});
  p.norm_eps = 1e-2F;
  p.swiglu = true;
  p.residual = residual.const_view();
  EXPECT_FALSE(takes_linear_forward(p));
  linear_forward(p, {"ref"});

  rms_norm_forward<float>({x.const_view(), p.norm_weight, p.norm_eps, normed.view()}, {"ref"});
  linear_forward({normed.const_view(), weight.const_view(), products.view()}, {"ref"});
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < n / 2; ++c) {
      const double gate = products.at(r, c), silu = gate / (1 + std::exp(-gate));
      EXPECT_NEAR(y.at(r, c), silu * products.at(r, n / 2 + c) + residual.at(r, c), 2e-6 * (1 + std::abs(y.at(r, c))))
          << r << " " << c;
    }
  }
}

TEST(Linear, RefusesWhatDoesNotFit) {
  Random random(9);
  Matrix x(2, 5, random), weight(3, 4, random), y(2, 3);
  test::expect_error(
      [&] {
        linear_forward({x.const_view(), weight.const_view(), y.view()});
      },
      "weight", "got shape [3, 4], expected shape [3, 5]");
  test::expect_error(
      [&] {
        LinearForward p{x.const_view(), Matrix(3, 5).const_view(), y.view()};
        p.swiglu = true;
        linear_forward(p);
      },
      "outputs N", "got 3, expected an even number");
  test::expect_error(
      [&] {
        LinearForward p{x.const_view(), {}, y.view()};
        p.quant_weight = QuantWeight(QuantType::q8_0, 3, 32, random).matrix;
        linear_forward(p);
      },
      "columns of quant_weight", "got 32, expected 5");
  Matrix fitting(3, 5, random);
  EXPECT_EQ(linear_forward({x.const_view(), fitting.const_view(), y.view()}).implementation, "simd");
}

INSTANTIATE_TEST_SUITE_P(Targets, LinearOnTarget, testing::ValuesIn(cpu::supported_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace efla
