#include "bench/report.h"

#include <fmt/format.h>

#include <cstdio>

namespace efla::bench {
namespace {

bool is_decode(const Measured& m) { return m.of.operation == Operation::decode; }

// Converts seconds per call to microseconds per token and head.
double per_token_head(const Measured& m, double seconds) {
  return 1e6 * seconds / static_cast<double>(m.of.heads * (is_decode(m) ? 1 : m.of.tokens));
}

double flops_per_second(const Measured& m, const Result& r) {
  return r.flops / (1e-6 * per_token_head(m, r.timing.median));
}

// Returns the peer's time divided by this contender's; 0 without a time of the peer.
double times(const char* peer, const Measured& m, const Result& r) {
  for (const Result& other : m.results) {
    if (other.contender == peer) return other.timing.median / r.timing.median;
  }
  return 0.0;
}

std::string times_text(const char* peer, const Measured& m, const Result& r) {
  const double factor = times(peer, m, r);
  return factor > 0 ? fmt::format("{:.1f}", factor) : "-";
}

void print_row(const Measured& m, const Result& r) {
  if (!r.fault.empty()) {
    fmt::print("  {:<18} WRONG, not timed: {}\n", r.contender, r.fault);
    return;
  }
  const Timing& t = r.timing;
  const double tokens = is_decode(m) ? 1.0 : static_cast<double>(m.of.tokens);
  const double rate = flops_per_second(m, r);
  fmt::print("  {:<18}{:>9.3f}{:>9.3f}{:>9.3f}{:>9.3f}{:>12.0f}{:>9.1f}{:>8.1f}%{:>9}{:>8}{:>10.1e}", r.contender,
             per_token_head(m, t.median), per_token_head(m, t.min), per_token_head(m, t.p90),
             per_token_head(m, t.cpu_median), tokens / t.median, 1e-9 * rate, 100 * rate / m.matrix_flops,
             times_text("eager", m, r), times_text("ggml", m, r), r.error);
  if (is_decode(m)) {
    fmt::print("{:>9.1f}{:>10.3f}{:>9.2f}", 1e-3 * r.bytes / per_token_head(m, t.median),
               per_token_head(m, r.stream_seconds), t.median / r.stream_seconds);
  }
  fmt::print("\n");
}

}  // namespace

std::vector<nlohmann::ordered_json> to_json(const Measured& m) {
  std::vector<nlohmann::ordered_json> lines;
  for (const Result& r : m.results) {
    nlohmann::ordered_json line{{"case", m.of.name() + "/" + r.contender},
                                {"operation", name_of(m.of.operation)},
                                {"contender", r.contender},
                                {"decay", efla::name_of(m.of.decay)},
                                {"dtype", m.of.dtype == at::kBFloat16 ? "bfloat16" : "float32"},
                                {"key_dim", m.of.dim},
                                {"value_dim", m.of.dim},
                                {"batch", 1},
                                {"heads", m.of.heads},
                                {"tokens", is_decode(m) ? 1 : m.of.tokens},
                                {"relative_rms_error", r.error}};
    if (!r.detail.empty()) line["detail"] = r.detail;
    if (!r.trials.empty()) line["trials"] = r.trials;
    if (!r.fault.empty()) {
      line["fault"] = r.fault;
      lines.push_back(line);
      continue;
    }
    const Timing& t = r.timing;
    line["us_per_token_head"] = {{"median", per_token_head(m, t.median)},
                                 {"min", per_token_head(m, t.min)},
                                 {"p90", per_token_head(m, t.p90)},
                                 {"cpu_median", per_token_head(m, t.cpu_median)}};
    line["samples"] = t.samples;
    line["tokens_per_s"] = (is_decode(m) ? 1.0 : static_cast<double>(m.of.tokens)) / t.median;
    line["flops_per_token_head"] = r.flops;
    line["gflops"] = 1e-9 * flops_per_second(m, r);
    line["matrix_gflops"] = 1e-9 * m.matrix_flops;
    line["share_of_matrix_peak"] = flops_per_second(m, r) / m.matrix_flops;
    line["memory_gb_per_s"] = 1e-9 * m.stream_bandwidth;
    for (const char* peer : {"eager", "ggml"}) {
      if (const double factor = times(peer, m, r); factor > 0) line[std::string("times_") + peer] = factor;
    }
    if (is_decode(m)) {
      line["state_gb_per_s"] = 1e-3 * r.bytes / per_token_head(m, t.median);
      line["stream_us_per_token_head"] = per_token_head(m, r.stream_seconds);
      line["times_stream"] = t.median / r.stream_seconds;
    }
    lines.push_back(line);
  }
  return lines;
}

void print_case(const Measured& m) {
  fmt::print(
      "\n{}: B = 1, T = {}, H = {}; best in the same turns: float32 matrix product {:.1f} GFLOP/s, memory {:.1f} "
      "GB/s\n",
      m.of.name(), is_decode(m) ? 1 : m.of.tokens, m.of.heads, 1e-9 * m.matrix_flops, 1e-9 * m.stream_bandwidth);
  fmt::print("  {:<18}{:>9}{:>9}{:>9}{:>9}{:>12}{:>9}{:>9}{:>9}{:>8}{:>10}", "us a token, head", "median", "min", "p90",
             "cpu", "tokens/s", "GFLOP/s", "of peak", "x eager", "x ggml", "error");
  fmt::print("{}\n", is_decode(m) ? "     GB/s us stream x stream" : "");
  for (const Result& r : m.results) print_row(m, r);
  for (const Result& r : m.results) {
    if (!r.detail.empty()) fmt::print("  {}: {}\n", r.contender, r.detail);
  }
  std::fflush(stdout);
}

void print_scaling(const std::vector<Measured>& all) {
  std::string previous;
  for (const Measured& first : all) {
    if (first.of.name() == previous) continue;
    previous = first.of.name();
    fmt::print("\n{}: B = 1, H = {}; us per token and head (median), and relative to the first\n  {:<12}", previous,
               first.of.heads, "T");
    for (const Result& r : first.results) fmt::print("{:>18}", r.contender);
    fmt::print("\n");
    for (const Measured& m : all) {
      if (m.of.name() != previous) continue;
      fmt::print("  {:<12}", m.of.tokens);
      for (std::size_t i = 0; i < m.results.size(); ++i) {
        const double now = per_token_head(m, m.results[i].timing.median);
        const double then = per_token_head(first, first.results[i].timing.median);
        fmt::print("{:>18}", m.results[i].fault.empty() ? fmt::format("{:.3f} ({:.2f})", now, now / then) : "WRONG");
      }
      fmt::print("\n");
    }
  }
}

}  // namespace efla::bench
