#include "bench/op/suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "bench/machine.h"
#include "bench/op/ceilings.h"
#include "bench/op/ggml_delta.h"
#include "efla/ops/delta.h"

namespace efla::bench {
namespace {

constexpr std::int64_t kSmallTokens = 2 * kChunk + 13;  // whole chunks and a part of one, for chunks of 32 and 64
constexpr std::int64_t kSmallHeads = 2;
constexpr int kFormTrials = 3;
constexpr std::int64_t kMostReferenceTokens = 4096;  // the reference's backward holds a state per token

// One variant of a contender: a peer has several, and the fastest one is timed.
struct Form {
  std::string detail;
  std::function<Contender(const Inputs&)> make;
};

struct Entry {
  std::string name;
  double flops;  // per token and head
  bool cold;     // decode: states from memory, not from cache
  std::vector<Form> forms;
};

// Return the multiplications and additions that an algorithm needs per token and head; triangular products count as
// triangles.
double recurrence_flops(const Case& c) {
  const auto d = static_cast<double>(c.dim);
  return 6 * d * d;
}
double chunk_flops(const Case& c) {
  const auto d = static_cast<double>(c.dim), chunk = static_cast<double>(kChunk);
  return c.operation == Operation::forward_backward ? 20 * d * d + 15 * chunk * d : 6 * d * d + 4 * chunk * d;
}
// Returns the operations of `auto` with the backward, which takes the forward of the recurrence: 4 C d fewer than with
// the chunk forward.
double auto_flops(const Case& c) {
  return chunk_flops(c) - 4 * static_cast<double>(kChunk) * static_cast<double>(c.dim);
}

bool is_decode(const Case& c) { return c.operation == Operation::decode; }

// Returns one thread and all threads, because one may be faster for small matrices and few heads.
std::vector<int> thread_choices() {
  const int all = default_pool().threads();
  return all > 1 ? std::vector<int>{1, all} : std::vector<int>{1};
}

Form eager_form(const Case& c, const EagerForm& form, int blas_threads) {
  const std::string how = is_decode(c) ? "" : name_of(form) + ", ";
  return {fmt::format("{}{} BLAS threads", how, blas_threads),
          [form, blas_threads, operation = c.operation](const Inputs& in) {
            Contender contender = operation == Operation::decode    ? eager_decode(in)
                                  : operation == Operation::forward ? eager_forward(in, form)
                                                                    : eager_forward_backward(in, form);
            contender.run = [run = contender.run, blas_threads] {
              use_blas_threads(blas_threads);
              run();
              use_blas_threads(default_pool().threads());
            };
            return contender;
          }};
}

Entry eager_entry(const Case& c) {
  Entry entry{"eager", is_decode(c) ? recurrence_flops(c) : chunk_flops(c), false, {}};
  std::vector<EagerForm> ways;
  for (const std::int64_t chunk : {32, 64}) {
    for (const UtTransform transform : {UtTransform::triangular_solve, UtTransform::row_loop}) {
      ways.push_back({chunk, transform});
    }
  }
  if (is_decode(c)) ways.resize(1);  // one token has no chunks
  for (const EagerForm& way : ways) {
    for (const int threads : thread_choices()) entry.forms.push_back(eager_form(c, way, threads));
  }
  return entry;
}

#ifdef EFLA_BENCH_GGML
Entry ggml_entry(const Case& c) {
  Entry entry{"ggml", recurrence_flops(c), false, {}};
  for (const int threads : thread_choices()) {
    entry.forms.push_back({fmt::format("{} threads", threads), [threads, decode = is_decode(c)](const Inputs& in) {
                             return decode ? ggml_step(in, threads) : ggml_forward(in, threads);
                           }});
  }
  return entry;
}
#endif

std::vector<Entry> entries(const Case& c) {
  std::vector<Entry> list;
  const auto add = [&](const char* name, double flops, bool cold, std::function<Contender(const Inputs&)> make) {
    list.push_back({name, flops, cold, {{"", std::move(make)}}});
  };
  if (is_decode(c)) {
    const std::int64_t state_bytes = 4 * c.heads * c.dim * c.dim;
    const std::int64_t copies = std::max<std::int64_t>(1, kLargeBytes / state_bytes);
    add("step", recurrence_flops(c), false, [](const Inputs& in) { return efla_step(in, "auto", 1); });
    add("step, cold states", recurrence_flops(c), true,
        [copies](const Inputs& in) { return efla_step(in, "auto", copies); });
  } else {
    const bool backward = c.operation == Operation::forward_backward;
    const auto add_form = [&](const char* name, double flops) {
      add(name, flops, false,
          [=](const Inputs& in) { return backward ? efla_forward_backward(in, name) : efla_forward(in, name); });
    };
    add_form("chunk", chunk_flops(c));
    if (backward) {
      add_form("auto", auto_flops(c));
    } else {
      add_form("recurrent", recurrence_flops(c));
    }
  }
  if (!c.with_peers) return list;
  if (c.decay == Decay::none) list.push_back(eager_entry(c));
#ifdef EFLA_BENCH_GGML
  if (c.dtype == at::kFloat && c.operation != Operation::forward_backward) list.push_back(ggml_entry(c));
#endif
  return list;
}

std::vector<Entry> wanted_entries(const Case& c, const std::string& filter) {
  std::vector<Entry> list = entries(c);
  std::erase_if(list,
                [&](const Entry& entry) { return (c.name() + "/" + entry.name).find(filter) == std::string::npos; });
  return list;
}

// The fastest variant on a quarter of the tokens, and the time of every variant there.
struct Chosen {
  Form form;
  std::vector<std::string> trials;
};

Chosen fastest_form(const Case& c, const std::vector<Form>& forms) {
  if (forms.size() == 1) return {forms.front(), {}};
  const std::int64_t tokens = is_decode(c) ? 1 : std::max<std::int64_t>(c.tokens / 4, 1);
  const Inputs inputs = random_inputs(tokens, c.heads, c.dim, c.dtype, c.decay);
  std::vector<std::function<void()>> runs;
  for (const Form& form : forms) runs.push_back(form.make(inputs).run);
  const std::vector<Timing> timings = take_turns(runs, kFormTrials);
  std::size_t best = 0;
  std::vector<std::string> trials;
  for (std::size_t i = 0; i < forms.size(); ++i) {
    if (timings[i].min < timings[best].min) best = i;
    trials.push_back(fmt::format("{}: {:.2f} us at T = {}", forms[i].detail,
                                 1e6 * timings[i].min / static_cast<double>(tokens * c.heads), tokens));
  }
  return {forms[best], trials};
}

// A contender after one checked call, or the reason why there is none.
struct Checked {
  std::optional<Contender> contender;
  Agreement agreement;
};

// Returns the outputs of the first head.
Outputs first_head(Outputs outputs, Operation operation) {
  for (auto& [name, value] : outputs) {
    const bool is_state = name == "state" || name == "final_state";
    value = value.narrow(is_state || operation == Operation::decode ? 1 : 2, 0, 1);
  }
  return outputs;
}

// Checks contenders: on a short sequence and, if the reference fits into memory, on the first head of the timed inputs
// against the reference; on the timed inputs against the first contender that passed.
class Gate {
 public:
  Gate(const Case& c, const Inputs& inputs)
      : case_(c),
        inputs_(inputs),
        small_(random_inputs(kSmallTokens, kSmallHeads, c.dim, c.dtype, c.decay)),
        small_reference_(reference(small_, c.operation)) {
    if (c.tokens <= kMostReferenceTokens) head_reference_ = reference(inputs.heads(1), c.operation);
  }

  Checked check(const Form& form) {
    const double most = tolerance(case_.dtype);
    const Contender small = form.make(small_);
    small.run();
    Agreement agreement = compare(small.outputs(), small_reference_, most);
    if (!agreement.fault.empty()) return {std::nullopt, agreement};
    const Contender contender = form.make(inputs_);
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

std::vector<std::string> contender_names(const Case& c) {
  std::vector<std::string> names;
  for (const Entry& entry : entries(c)) names.push_back(c.name() + "/" + entry.name);
  return names;
}

Measured measure(const Case& c, const std::string& filter, int rounds) {
  Measured measured{c, {}};
  const std::vector<Entry> list = wanted_entries(c, filter);
  if (list.empty()) return measured;
  const Inputs inputs = random_inputs(is_decode(c) ? 1 : c.tokens, c.heads, c.dim, c.dtype, c.decay);
  const std::int64_t state_bytes = 4 * c.dim * c.dim;  // of a head, float32
  Gate gate(c, inputs);

  ThreadPool one_core(1);
  std::vector<std::function<void()>> functions{matrix_product(default_pool().threads()),
                                               memory_stream(kLargeBytes, default_pool())};
  if (is_decode(c)) {
    functions.push_back(memory_stream(state_bytes * c.heads, one_core));
    functions.push_back(memory_stream(kLargeBytes, one_core));
  }
  const std::size_t first = functions.size();
  for (const Entry& entry : list) {
    const Chosen chosen = fastest_form(c, entry.forms);
    const Checked checked = gate.check(chosen.form);
    Result result{.contender = entry.name, .detail = chosen.form.detail, .fault = checked.agreement.fault};
    result.error = checked.agreement.error;
    result.flops = entry.flops;
    if (is_decode(c)) result.bytes = 2.0 * static_cast<double>(state_bytes);
    if (checked.contender) {
      functions.push_back(checked.contender->run);
      result.trials = chosen.trials;
    }
    measured.results.push_back(std::move(result));
  }
  const std::vector<Timing> timings = take_turns(functions, rounds);
  measured.matrix_flops = kMatrixFlops / timings[0].min;
  measured.stream_bandwidth = 2.0 * static_cast<double>(kLargeBytes) / timings[1].min;
  std::size_t next = first;
  for (std::size_t i = 0; i < list.size(); ++i) {
    Result& result = measured.results[i];
    if (!result.fault.empty()) continue;
    result.timing = timings[next++];
    if (!is_decode(c)) continue;
    result.stream_seconds =
        list[i].cold ? timings[3].median * static_cast<double>(state_bytes * c.heads) / static_cast<double>(kLargeBytes)
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
          all.push_back({operation, dtype, dim, tokens, heads, true, decay});
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
