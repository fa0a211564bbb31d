#include "experiments/stability/stability.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "experiments/stability/state_growth.h"

namespace efla::experiments {
namespace {

using nlohmann::ordered_json;

constexpr std::uint64_t kSeed = 42;
constexpr double kAnyX = std::numeric_limits<double>::infinity();

struct Rule {
  const char* name;
  const char* step;
  double erase_scale;
  double limit;  // the largest x = β‖k‖² with |1 − aλ| ≤ 1
};
constexpr Rule kRules[] = {
    {"euler", "euler", 1, 2},
    {"euler, erase 2 beta", "euler", 2, 1},
    {"rk2", "rk2", 1, 2},
    {"rk4", "rk4", 1, 2.785293563405282},
    {"exact", "exact", 1, kAnyX},
    {"implicit_euler", "implicit_euler", 1, kAnyX},
    {"trapezoid", "trapezoid", 1, kAnyX},
};

struct Numbers {
  const char* name;
  Precision precision;
};
constexpr Numbers kNumbers[] = {{"float32", {}},
                                {"bfloat16", {.bfloat16_inputs = true}},
                                {"bfloat16 state", {.bfloat16_inputs = true, .bfloat16_state = true}}};

// Values of x = β‖k‖²: over orders of magnitude, and close to both sides of every limit.
const std::vector<double> kProducts{0.25, 0.5, 0.99, 1, 1.01, 1.5, 1.99, 2, 2.01, 2.5, 2.78, 2.79, 4, 32, 1000, 10000};

struct Keying {
  Keys keys;
  double beta;
  bool with_error;  // against float64
};
constexpr Keying kKeyings[] = {{Keys::repeated, 1.0, true}, {Keys::repeated, 0.25, false}, {Keys::random, 1.0, true}};

const char* name_of(Keys keys) { return keys == Keys::repeated ? "repeated" : "random"; }

DeltaRule delta_rule(const char* step, double erase_scale) {
  DeltaRule rule;
  rule.step = parse_step_size(step);
  rule.step.erase_scale = erase_scale;
  return rule;
}

// Returns x with four significant digits, null if it is not finite.
ordered_json rounded(double x) {
  return std::isfinite(x) ? ordered_json(std::stod(fmt::format("{:.3e}", x))) : nullptr;
}
ordered_json count(std::int64_t n) { return n > 0 ? ordered_json(n) : nullptr; }

// One line of results: the fields that a sweep shares, and a column per measured number.
struct Row {
  ordered_json fields, columns = ordered_json::object();
  template <class X>
  void add(const char* column, const X& value) {
    columns[column].push_back(value);
  }
};

using Write = std::function<void(const ordered_json&)>;

ordered_json to_json(Row line) {
  line.fields.update(line.columns);
  return line.fields;
}

void add(Row& line, const Growth& growth) {
  line.add("largest", rounded(growth.largest));
  line.add("last", rounded(growth.last));
  line.add("beyond", count(growth.beyond));
  line.add("not_finite", count(growth.not_finite));
}

// Returns a sentence with the largest x below every broken one, and the smallest broken one.
std::string outcome(const std::vector<double>& products, const std::vector<bool>& bounded) {
  const auto first_broken = std::find(bounded.begin(), bounded.end(), false) - bounded.begin();
  if (first_broken == static_cast<std::ptrdiff_t>(bounded.size())) return "bounded throughout";
  const bool again = std::find(bounded.begin() + first_broken, bounded.end(), true) != bounded.end();
  return fmt::format("bounded to x = {}, broken from {}{}", first_broken > 0 ? products[first_broken - 1] : 0,
                     products[first_broken], again ? ", with exceptions above" : "");
}

Row products_line(const Stream& stream, const Rule& rule, const Keying& keying, const Numbers& numbers) {
  return {{{"study", "products"},
           {"rule", rule.name},
           {"precision", numbers.name},
           {"keys", name_of(keying.keys)},
           {"beta", keying.beta},
           {"tokens", stream.tokens},
           {"key_dim", kStateDim},
           {"value_dim", kStateDim},
           {"seed", kSeed},
           {"bound", kGrowthBound},
           {"limit", rounded(rule.limit)}}};
}

// Measures every x for one rule and one way of choosing keys, in every precision.
void sweep_products(const Stream& stream, const Rule& rule, const Keying& keying, const Write& write) {
  std::vector<Row> lines;
  std::vector<std::vector<bool>> bounded(std::size(kNumbers));
  for (const Numbers& numbers : kNumbers) lines.push_back(products_line(stream, rule, keying, numbers));
  for (const double x : kProducts) {
    const HeadRun head{.rule = delta_rule(rule.step, rule.erase_scale),
                       .lambda = x / keying.beta,
                       .beta = keying.beta,
                       .keys = keying.keys};
    std::vector<double> reference;
    bool rounded_inputs = false;  // whether the reference has rounded inputs
    for (std::size_t i = 0; i < std::size(kNumbers); ++i) {
      const Precision& precision = kNumbers[i].precision;
      const Growth growth = grow(stream, head, precision);
      double error = NAN;
      if (keying.with_error && growth.not_finite == 0) {
        if (reference.empty() || rounded_inputs != precision.bfloat16_inputs) {
          rounded_inputs = precision.bfloat16_inputs;
          reference = reference_state(stream, head, rounded_inputs);
        }
        error = relative_error(growth.state, reference);
      }
      lines[i].add("x", x);
      lines[i].add("lambda", head.lambda);
      lines[i].add("eigenvalue", rounded(eigenvalue(stream, head, precision, 0)));
      add(lines[i], growth);
      if (keying.with_error) lines[i].add("error", rounded(error));
      bounded[i].push_back(growth.beyond == 0);
    }
  }
  for (std::size_t i = 0; i < std::size(kNumbers); ++i) {
    fmt::print("  {:<20}{:<16}{:<10}{:<7}{}\n", rule.name, kNumbers[i].name, name_of(keying.keys), keying.beta,
               outcome(kProducts, bounded[i]));
    write(to_json(std::move(lines[i])));
  }
  std::fflush(stdout);
}

// The transition I − 2η k kᵀ with ‖k‖ = 1 and η → 1, whose eigenvalue rounding to bfloat16 may take below −1.
const std::vector<double> kEtas{0.9, 0.96875, 0.984375, 0.9921875, 0.99609375, 0.999, 1.0};
constexpr std::int64_t kRepeatedKeys = 8;

struct Normalised {
  const char* name;
  Precision precision;
  bool inside;  // normalised by the operator, in float32, not before rounding
};
constexpr Normalised kNormalised[] = {
    {"float32", {}, false},
    {"bfloat16", {.bfloat16_inputs = true}, false},
    {"bfloat16, normalised inside", {.bfloat16_inputs = true}, true},
    {"bfloat16 state", {.bfloat16_inputs = true, .bfloat16_state = true}, false},
    {"bfloat16 state, normalised inside", {.bfloat16_inputs = true, .bfloat16_state = true}, true}};

void sweep_etas(const Stream& stream, const Normalised& way, Keys keys, const Write& write) {
  const std::int64_t runs = std::min(keys == Keys::repeated ? kRepeatedKeys : 1, stream.tokens);
  Row line{{{"study", "eta"},
            {"rule", "euler, erase 2 beta"},
            {"precision", way.name},
            {"keys", name_of(keys)},
            {"runs", runs},
            {"tokens", stream.tokens},
            {"key_dim", kStateDim},
            {"value_dim", kStateDim},
            {"seed", kSeed},
            {"bound", kGrowthBound}}};
  for (const double eta : kEtas) {
    HeadRun head{.rule = delta_rule("euler", 2), .beta = eta, .keys = keys};
    head.rule.qk_l2norm = way.inside;
    std::vector<double> largest;
    std::int64_t broken = 0, beyond = 0, below = 0;
    double least = 1;
    for (std::int64_t run = 0; run < runs; ++run) {
      head.direction = run;
      const Growth growth = grow(stream, head, way.precision);
      largest.push_back(growth.largest);
      if (growth.beyond > 0) {
        ++broken;
        beyond = beyond > 0 ? std::min(beyond, growth.beyond) : growth.beyond;
      }
    }
    for (std::int64_t direction = 0; direction < (keys == Keys::repeated ? runs : stream.tokens); ++direction) {
      const double value = eigenvalue(stream, head, way.precision, direction);
      least = std::min(least, value);
      below += value < -1;
    }
    std::sort(largest.begin(), largest.end());
    line.add("eta", eta);
    line.add("least_eigenvalue", least);
    line.add("keys_below_minus_one", below);
    line.add("broken", broken);
    line.add("beyond", count(beyond));
    line.add("largest_median", rounded(largest[largest.size() / 2]));
    line.add("largest", rounded(largest.back()));
  }
  fmt::print("  {:<36}{:<10}{:>3}", way.name, name_of(keys), runs);
  for (const auto& broken : line.columns["broken"]) fmt::print("{:>12}", broken.dump());
  fmt::print("\n");
  std::fflush(stdout);
  write(to_json(std::move(line)));
}

// Measures how far rounding to bfloat16 takes ‖k‖² of unit keys from 1, and the largest η whose eigenvalue 1 − 2η‖k‖²
// is at least −1 for all of them.
void measure_lengths(std::int64_t keys, const Write& write) {
  Row line{{{"study", "lengths"}, {"keys", keys}, {"seed", kSeed}}};
  for (const std::int64_t dim : {16, 64, 128, 256}) {
    Random random(kSeed, static_cast<std::uint64_t>(dim));
    double largest = 0, squares = 0;
    std::int64_t above = 0;
    std::vector<double> key(dim);
    for (std::int64_t n = 0; n < keys; ++n) {
      double length = 0, lambda = 0;
      for (double& x : key) {
        x = random.normal();
        length += x * x;
      }
      for (const double x : key) {
        const double stored = to_float(to_bfloat16(static_cast<float>(x / std::sqrt(length))));
        lambda += stored * stored;
      }
      largest = std::max(largest, lambda);
      squares += (lambda - 1) * (lambda - 1);
      above += lambda > 1;
    }
    line.add("dim", dim);
    line.add("share_above_one", rounded(static_cast<double>(above) / static_cast<double>(keys)));
    line.add("deviation", rounded(std::sqrt(squares / static_cast<double>(keys))));
    line.add("largest", largest);
    line.add("safe_eta", 1 / largest);
    fmt::print("  K = {:<4} rms deviation {:.5f}, largest {:.5f}, so eta up to {:.5f}\n", dim,
               std::sqrt(squares / static_cast<double>(keys)), largest, 1 / largest);
  }
  write(to_json(std::move(line)));
}

}  // namespace

void measure_stability(std::int64_t tokens, const Write& write) {
  const Stream stream(tokens, kSeed);
  fmt::print("\nState after {} tokens, K = V = {}; broken: its norm passes {:g}\n", tokens, kStateDim, kGrowthBound);
  fmt::print("  {:<20}{:<16}{:<10}{:<7}\n", "rule", "precision", "keys", "beta");
  for (const Rule& rule : kRules) {
    for (const Keying& keying : kKeyings) sweep_products(stream, rule, keying, write);
  }
  fmt::print("\nI - 2 eta k k^T, |k| = 1: runs that break\n  {:<36}{:<10}{:>3}", "precision", "keys", "of");
  for (const double eta : kEtas) fmt::print("{:>12}", eta);
  fmt::print("\n");
  for (const Normalised& way : kNormalised) {
    for (const Keys keys : {Keys::repeated, Keys::random}) sweep_etas(stream, way, keys, write);
  }
  fmt::print("\n|k|^2 of unit keys rounded to bfloat16, {} keys\n", tokens);
  measure_lengths(tokens, write);
}

}  // namespace efla::experiments
