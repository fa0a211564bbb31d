#include "bench/suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "bench/ceilings.h"
#include "bench/machine.h"
#include "efla/ops/delta.h"

namespace efla::bench {
namespace {

constexpr std::int64_t kSmallTokens = 2 * kChunk + 13;  // whole chunks and a part of one, for 32 and 64
constexpr std::int64_t kSmallHeads = 2;
constexpr int kEagerTrials = 3;
constexpr std::int64_t kMostReferenceTokens = 4096;  // its backward holds a state for every token

struct Entry {
  std::string name;
  std::string detail;
  std::vector<std::string> trials;
  double flops;  // a token and head
  bool cold;     // decode: states from memory, not from cache
  std::function<Contender(const Inputs&)> make;
};

// Multiplications and additions that a form needs a token and head, of triangular products only the triangle.
double recurrence_flops(const Case& c) {
  const auto d = static_cast<double>(c.dim);
  return c.operation == Operation::forward_backward ? 20 * d * d : 6 * d * d;
}
double chunk_flops(const Case& c) {
  const auto d = static_cast<double>(c.dim), chunk = static_cast<double>(kChunk);
  return c.operation == Operation::forward_backward ? 20 * d * d + 15 * chunk * d : 6 * d * d + 4 * chunk * d;
}

// A form of the peer and the threads of its BLAS: where matrices are small, one may beat all.
struct EagerChoice {
  EagerForm form;
  int blas_threads;
};

std::string describe(const Case& c, const EagerChoice& choice) {
  const std::string form = c.operation == Operation::decode ? "" : name_of(choice.form) + ", ";
  return fmt::format("{}{} BLAS threads", form, choice.blas_threads);
}

Entry eager_entry(const Case& c, const EagerChoice& choice, const std::string& detail) {
  const bool decode = c.operation == Operation::decode;
  return {"eager",
          detail,
          {},
          decode ? recurrence_flops(c) : chunk_flops(c),
          false,
          [choice, operation = c.operation](const Inputs& in) {
            Contender contender = operation == Operation::decode    ? eager_decode(in)
                                  : operation == Operation::forward ? eager_forward(in, choice.form)
                                                                    : eager_forward_backward(in, choice.form);
            contender.run = [run = contender.run, threads = choice.blas_threads] {
              use_blas_threads(threads);
              run();
              use_blas_threads(default_pool().threads());
            };
            return contender;
          }};
}

std::vector<EagerChoice> eager_choices(const Case& c) {
  const int threads = default_pool().threads();
  std::vector<EagerChoice> choices;
  if (c.operation == Operation::decode) {
    choices.push_back({{}, 1});
    if (threads > 1) choices.push_back({{}, threads});
    return choices;
  }
  for (const std::int64_t chunk : {32, 64}) {
    for (const UtTransform transform : {UtTransform::triangular_solve, UtTransform::row_loop}) {
      choices.push_back({{chunk, transform}, 1});
      if (threads > 1) choices.push_back({{chunk, transform}, threads});
    }
  }
  return choices;
}

// The fastest way of the peer on a quarter of the tokens.
Entry best_eager(const Case& c) {
  const std::int64_t tokens = c.operation == Operation::decode ? 1 : std::max<std::int64_t>(c.tokens / 4, 1);
  const Inputs inputs = random_inputs(tokens, c.heads, c.dim, c.dtype, c.decay);
  const std::vector<EagerChoice> choices = eager_choices(c);
  std::vector<std::function<void()>> runs;
  for (const EagerChoice& choice : choices) runs.push_back(eager_entry(c, choice, "").make(inputs).run);
  const std::vector<Timing> timings = take_turns(runs, kEagerTrials);
  std::size_t best = 0;
  std::vector<std::string> trials;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (timings[i].min < timings[best].min) best = i;
    trials.push_back(fmt::format("{}: {:.2f} us at T = {}", describe(c, choices[i]),
                                 1e6 * timings[i].min / static_cast<double>(tokens * c.heads), tokens));
  }
  Entry entry = eager_entry(c, choices[best], describe(c, choices[best]));
  entry.trials = trials;
  return entry;
}

std::vector<Entry> entries(const Case& c, const std::string& filter) {
  const auto wanted = [&](const std::string& name) {
    return (c.name() + "/" + name).find(filter) != std::string::npos;
  };
  std::vector<Entry> list;
  if (c.operation == Operation::decode) {
    const double state_bytes = 4.0 * static_cast<double>(c.heads * c.dim * c.dim);
    const auto copies =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(kLargeBytes) / state_bytes));
    list.push_back(
        {"step", "", {}, recurrence_flops(c), false, [](const Inputs& in) { return efla_step(in, "auto", 1); }});
    list.push_back({"step, cold states", "", {}, recurrence_flops(c), true, [copies](const Inputs& in) {
                      return efla_step(in, "auto", copies);
                    }});
  } else {
    const bool backward = c.operation == Operation::forward_backward;
    for (const char* name : {"chunk", "recurrent"}) {
      const double flops = name == std::string("chunk") ? chunk_flops(c) : recurrence_flops(c);
      list.push_back({name, "", {}, flops, false, [=](const Inputs& in) {
                        return backward ? efla_forward_backward(in, name) : efla_forward(in, name);
                      }});
    }
  }
  if (c.with_eager && wanted("eager")) list.push_back(best_eager(c));
  std::erase_if(list, [&](const Entry& entry) { return !wanted(entry.name); });
  return list;
}

// A contender after one checked call, or why it has none.
struct Checked {
  std::optional<Contender> contender;
  Agreement agreement;
};

// The outputs of the first head alone.
Outputs first_head(Outputs outputs, Operation operation) {
  for (auto& [name, value] : outputs) {
    const bool is_state = name == "state" || name == "final_state";
    value = value.narrow(is_state || operation == Operation::decode ? 1 : 2, 0, 1);
  }
  return outputs;
}

// Checks one contender: a short sequence and, if it fits, the first head of the timed one against the reference; and
// the timed one against the first contender that passed.
class Gate {
 public:
  Gate(const Case& c, const Inputs& inputs)
      : case_(c),
        inputs_(inputs),
        small_(random_inputs(kSmallTokens, kSmallHeads, c.dim, c.dtype, c.decay)),
        small_reference_(reference(small_, c.operation)) {
    if (c.tokens <= kMostReferenceTokens) head_reference_ = reference(inputs.heads(1), c.operation);
  }

  Checked check(const Entry& entry) {
    const double most = tolerance(case_.dtype);
    const Contender small = entry.make(small_);
    small.run();
    Agreement agreement = compare(small.outputs(), small_reference_, most);
    if (!agreement.fault.empty()) return {std::nullopt, agreement};
    const Contender contender = entry.make(inputs_);
    contender.run();
    const Outputs outputs = contender.outputs();
    if (!head_reference_.empty()) {
      agreement = compare(first_head(outputs, case_.operation), head_reference_, most);
      if (!agreement.fault.empty()) return {std::nullopt, agreement};
    }
    if (first_.empty()) {
      for (const auto& [name, value] : outputs) first_.emplace_back(name, value.clone());
    } else if (const Agreement other = compare(outputs, first_, most); !other.fault.empty()) {
      return {std::nullopt, {other.error, "against the other contenders, " + other.fault}};
    }
    return {contender, agreement};
  }

 private:
  const Case& case_;
  const Inputs& inputs_;
  Inputs small_;
  Outputs small_reference_, head_reference_, first_;
};

}  // namespace

std::string Case::name() const {
  const std::string by = decay == Decay::none ? "" : fmt::format("{}/", efla::name_of(decay));
  return fmt::format("{}/d{}/{}{}", dtype == at::kBFloat16 ? "bfloat16" : "float32", dim, by, name_of(operation));
}

Measured measure(const Case& c, const std::string& filter, int rounds) {
  Measured measured{c, {}};
  const std::vector<Entry> list = entries(c, filter);
  if (list.empty()) return measured;
  const bool decode = c.operation == Operation::decode;
  const Inputs inputs = random_inputs(decode ? 1 : c.tokens, c.heads, c.dim, c.dtype, c.decay);
  const double bytes = decode ? 8.0 * static_cast<double>(c.dim * c.dim) : 0.0;  // float32 states, read and written
  Gate gate(c, inputs);

  const auto state_bytes = static_cast<std::int64_t>(bytes / 2) * c.heads;
  std::vector<std::function<void()>> functions{matrix_product(), memory_stream(kLargeBytes, default_pool()),
                                               memory_stream(decode ? state_bytes : 4096, default_pool())};
  const std::size_t first = functions.size();
  std::vector<Contender> kept;
  for (const Entry& entry : list) {
    const Checked checked = gate.check(entry);
    measured.results.push_back({entry.name,
                                entry.detail,
                                entry.trials,
                                checked.agreement.fault,
                                checked.agreement.error,
                                entry.flops,
                                bytes,
                                {}});
    if (checked.contender) {
      functions.push_back(checked.contender->run);
    } else {
      measured.results.back().trials.clear();  // times, too
    }
  }
  const std::vector<Timing> timings = take_turns(functions, rounds);
  measured.matrix_flops = kMatrixFlops / timings[0].min;
  measured.stream_bandwidth = 2.0 * static_cast<double>(kLargeBytes) / timings[1].min;
  std::size_t next = first;
  for (std::size_t i = 0; i < list.size(); ++i) {
    Result& result = measured.results[i];
    if (!result.fault.empty()) continue;
    result.timing = timings[next++];
    if (!decode) continue;
    result.stream_seconds =
        list[i].cold ? timings[1].median * static_cast<double>(state_bytes) / static_cast<double>(kLargeBytes)
                     : timings[2].median;
  }
  return measured;
}

std::vector<Case> cases(std::int64_t tokens, std::int64_t heads) {
  std::vector<Case> all;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
        for (const Operation operation : {Operation::forward, Operation::forward_backward, Operation::decode}) {
          all.push_back({operation, dtype, dim, tokens, heads, decay == Decay::none, decay});
        }
      }
    }
  }
  return all;
}

std::vector<Case> scaling_cases(std::int64_t heads) {
  std::vector<Case> all;
  for (const std::int64_t dim : {64, 128}) {
    for (const Operation operation : {Operation::forward, Operation::forward_backward}) {
      for (std::int64_t tokens = 1024; tokens <= 131072; tokens *= 2) {
        all.push_back({operation, at::kFloat, dim, tokens, heads, false});
      }
    }
  }
  return all;
}

}  // namespace efla::bench
