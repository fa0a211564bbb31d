#include "bench/op/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>

#include "bench/op/ceilings.h"
#include "efla/base/random.h"
#include "efla/ops/layers/attention.h"

namespace efla::bench {
namespace {

constexpr double kMostError = 1e-5;

std::vector<float> normal_numbers(std::int64_t count, Random& random) {
  std::vector<float> numbers(static_cast<std::size_t>(count));
  for (float& number : numbers) number = static_cast<float>(random.normal());
  return numbers;
}

// The pages of one text, in one allocation.
template <class S>
struct Pages {
  std::vector<S> memory;
  std::vector<S*> keys, values;

  Pages(const AttentionShape& shape, std::int64_t tokens) {
    const std::int64_t pages = shape.pages_for(tokens), key_elements = shape.key_page_elements(),
                       elements = key_elements + shape.value_page_elements();
    memory.resize(static_cast<std::size_t>(pages * elements));
    for (std::int64_t page = 0; page < pages; ++page) {
      keys.push_back(memory.data() + page * elements);
      values.push_back(keys.back() + key_elements);
    }
  }
};

// Texts of one case with the rows of new tokens, which all texts have alike.
template <class S>
class Texts {
 public:
  explicit Texts(const AttentionCase& c) : case_(c) {
    const AttentionShape& shape = c.shape;
    const std::int64_t n = c.tokens;
    const auto count = c.tokens == 1 ? static_cast<std::size_t>(std::ceil(kLargeBytes / c.bytes())) : 1;
    Random random(1);
    for (std::size_t i = 0; i < count; ++i) {
      texts_.push_back(std::make_unique<Pages<S>>(shape, c.begin + n));
      auto& memory = texts_.back()->memory;
      if (i > 0) {
        std::copy_n(texts_.front()->memory.begin(), memory.size(), memory.begin());
      } else {
        for (S& element : memory) element = from_state<S>(static_cast<float>(random.uniform(-1.0, 1.0)));
      }
    }
    q_ = normal_numbers(n * shape.heads * shape.key_dim, random);
    k_ = normal_numbers(n * shape.key_value_heads * shape.key_dim, random);
    v_ = normal_numbers(n * shape.key_value_heads * shape.value_dim, random);
    o_.resize(static_cast<std::size_t>(n * shape.heads * shape.value_dim));
  }

  // Computes the new tokens of the next text.
  void run() {
    compute("simd", *texts_[next_], 0, case_.tokens);
    next_ = (next_ + 1) % texts_.size();
  }

  // Returns the relative RMS error of the last token's outputs in the first text, which `run` computed.
  double error() {
    const std::vector<float> got = last_outputs();
    compute("ref", *texts_.front(), case_.tokens - 1, 1);
    const std::vector<float> expected = last_outputs();
    double error = 0, size = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double difference = static_cast<double>(got[i]) - expected[i];
      error += difference * difference;
      size += static_cast<double>(expected[i]) * expected[i];
    }
    return std::sqrt(error / size);
  }

 private:
  AttentionCase case_;
  std::vector<std::unique_ptr<Pages<S>>> texts_;
  std::size_t next_ = 0;
  std::vector<float> q_, k_, v_, o_;

  // Computes `tokens` new tokens from the first one on.
  void compute(const char* implementation, const Pages<S>& pages, std::int64_t first, std::int64_t tokens) {
    const AttentionShape& shape = case_.shape;
    const AttentionRun<S> run{case_.begin + first, tokens, pages.keys, pages.values};
    const auto rows = [&](auto& data, std::int64_t heads, std::int64_t dim) {
      return View<float, 3>::contiguous(data.data() + first * heads * dim, {tokens, heads, dim});
    };
    AttentionForward<S> p;
    p.shape = shape;
    p.runs = {&run, 1};
    p.q = rows(q_, shape.heads, shape.key_dim);
    p.k = rows(k_, shape.key_value_heads, shape.key_dim);
    p.v = rows(v_, shape.key_value_heads, shape.value_dim);
    p.o = rows(o_, shape.heads, shape.value_dim);
    attention_forward(p, {implementation});
  }

  std::vector<float> last_outputs() const { return {o_.end() - case_.shape.heads * case_.shape.value_dim, o_.end()}; }
};

template <class S>
MeasuredAttention measure(const AttentionCase& c, int rounds) {
  Texts<S> texts(c);
  texts.run();
  MeasuredAttention measured{c, {}, texts.error()};
  if (!(measured.error <= kMostError)) {
    throw std::runtime_error(
        fmt::format("bench attention: {} is wrong: relative RMS error {}", c.name(), measured.error));
  }
  const std::vector<Timing> timings = take_turns(
      {[&] { texts.run(); }, matrix_product(default_pool().threads()), memory_read(kLargeBytes, default_pool())},
      rounds);
  measured.timing = timings[0];
  measured.matrix_flops = kMatrixFlops / timings[1].min;
  measured.read_bandwidth = static_cast<double>(kLargeBytes) / timings[2].min;
  return measured;
}

}  // namespace

std::string AttentionCase::name() const {
  return fmt::format("{}/d{}/{}/{}", narrow_pages ? "bfloat16" : "float32", shape.key_dim,
                     tokens == 1 ? "decode" : "prefill", begin + tokens);
}

double AttentionCase::flops() const {
  const auto pairs = static_cast<double>(tokens) * (static_cast<double>(begin) + 0.5 * static_cast<double>(tokens + 1));
  return 2 * pairs * static_cast<double>(shape.heads * (shape.key_dim + shape.value_dim));
}

double AttentionCase::bytes() const {
  const std::int64_t elements = (begin + tokens) * shape.key_value_heads * (shape.key_dim + shape.value_dim);
  return (narrow_pages ? 2.0 : 4.0) * static_cast<double>(elements);
}

std::vector<AttentionCase> attention_cases() {
  constexpr std::int64_t kPageTokens = 64;
  std::vector<AttentionCase> all;
  for (const bool narrow : {false, true}) {
    for (const AttentionShape& shape :
         {AttentionShape{16, 4, 128, 128, kPageTokens}, AttentionShape{8, 2, 256, 256, kPageTokens}}) {
      for (const std::int64_t tokens : {512, 4096}) all.push_back({shape, narrow, 0, tokens});
      for (const std::int64_t tokens : {1000, 10'000, 100'000}) all.push_back({shape, narrow, tokens - 1, 1});
    }
  }
  return all;
}

MeasuredAttention measure_attention(const AttentionCase& c, int rounds) {
  return c.narrow_pages ? measure<bfloat16>(c, rounds) : measure<float>(c, rounds);
}

nlohmann::ordered_json to_json(const MeasuredAttention& m) {
  const Timing& t = m.timing;
  return {
      {"case", m.of.name()},
      {"heads", m.of.shape.heads},
      {"key_value_heads", m.of.shape.key_value_heads},
      {"relative_rms_error", m.error},
      {"ms",
       {{"median", 1e3 * t.median}, {"min", 1e3 * t.min}, {"p90", 1e3 * t.p90}, {"cpu_median", 1e3 * t.cpu_median}}},
      {"samples", t.samples},
      {"gflops", 1e-9 * m.of.flops() / t.median},
      {"matrix_gflops", 1e-9 * m.matrix_flops},
      {"key_value_gb_per_s", 1e-9 * m.of.bytes() / t.median},
      {"read_gb_per_s", 1e-9 * m.read_bandwidth}};
}

void print_attention_header() {
  fmt::print("{:<28}{:>11}{:>11}{:>11}{:>10}{:>9}{:>8}{:>9}{:>10}\n", "pages/dim/what/tokens", "median ms", "min ms",
             "p90 ms", "GFLOP/s", "of peak", "GB/s", "of read", "error");
}

void print_attention(const MeasuredAttention& m) {
  const Timing& t = m.timing;
  const double flops = m.of.flops() / t.median, bytes = m.of.bytes() / t.median;
  fmt::print("{:<28}{:>11.3f}{:>11.3f}{:>11.3f}{:>10.1f}{:>8.0f}%{:>8.1f}{:>8.0f}%{:>10.1e}\n", m.of.name(),
             1e3 * t.median, 1e3 * t.min, 1e3 * t.p90, 1e-9 * flops, 100 * flops / m.matrix_flops, 1e-9 * bytes,
             100 * bytes / m.read_bandwidth, m.error);
  std::fflush(stdout);
}

}  // namespace efla::bench
