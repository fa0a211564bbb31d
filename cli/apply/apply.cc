// efla apply: the operator on tensors in a file, for any language that reads and writes safetensors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/apply/apply_inputs.h"
#include "cli/apply/apply_place.h"
#include "cli/commands.h"
#include "cli/support/name_option.h"
#include "cli/support/output_file.h"
#include "cli/support/print.h"
#include "cli/support/threads.h"
#include "efla/base/dtype.h"
#include "efla/base/error.h"
#include "efla/base/memory.h"
#include "efla/base/text.h"
#include "efla/base/version.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/ops/delta.h"
#include "efla/ops/gpu.h"

namespace efla::cli {
namespace {

using io::NamedTensor;
using io::TensorType;

struct Options {
  std::string in, out;
  std::string step = "exact";
  double erase_scale = 1.0, write_scale = 1.0;
  std::optional<double> scale;
  bool qk_l2norm = false;
  std::optional<std::string> decay;  // none: as the file's g says
  std::string implementation = "auto", device = "cpu";
  std::optional<std::string> dtype;  // none: the type of the file
  bool grad = false, verbose = false;
  int threads = 0;
};

void check_name(const char* option, const std::string& name, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  throw Error("apply", option, "'" + name + "'",
              fmt::format("{} (nearest: {})", fmt::join(names, ", "), nearest_name(name, names)));
}

Device device_of(const Options& options) { return {options.device == "cuda" ? Device::Kind::cuda : Device::Kind::cpu}; }

// Refuses --device cuda where no GPU can be used.
void check_device(const Options& options) {
  check_name("--device", options.device, {"cpu", "cuda"});
  if (options.device == "cpu") return;
  const Gpus gpus = find_gpus();
  if (gpus.found.empty())
    throw Error("apply", "--device", "cuda", "cpu, because no GPU can be used here: " + gpus.absence);
}

DeltaRule rule_of(const Options& options) {
  DeltaRule rule;
  rule.step = parse_step_size(options.step);
  rule.step.erase_scale = options.erase_scale;
  rule.step.write_scale = options.write_scale;
  rule.qk_l2norm = options.qk_l2norm;
  if (options.scale) rule.scale = *options.scale;
  for (const auto& [option, value] : {std::pair{"--erase-scale", options.erase_scale},
                                      {"--write-scale", options.write_scale},
                                      {"--scale", options.scale.value_or(1.0)}}) {
    if (!std::isfinite(value)) throw Error("apply", option, fmt::format("{}", value), "a finite number");
  }
  return rule;
}

// Refuses a problem that exceeds the machine's memory: K x V states can be huge where the tensors read are small, and a
// file with holes claims sizes that nobody ever wrote.
void check_memory(const DeltaShape& shape, const DeltaRule& rule, bool grad, std::size_t element_bytes,
                  std::size_t state_bytes) {
  const double heads = double(shape.batch) * double(shape.value_heads), tokens = heads * double(shape.tokens);
  const double keys = rule.two_keys ? 3.0 : 2.0;
  const double token = keys * double(shape.key_dim) + 2.0 * double(shape.value_dim) + 1.0;  // q, the keys, v, o, beta
  const double gates = rule.decay == Decay::none ? 0.0 : rule.decay == Decay::scalar ? 1.0 : double(shape.key_dim);
  const double state = double(shape.value_heads) * double(shape.key_dim) * double(shape.value_dim);
  const double states =
      double(shape.sequences()) * (grad ? 3.0 : 2.0) + (grad ? double(shape.batch) * double(shape.chunks()) : 0.0);
  const double bytes = tokens * (token * double(element_bytes) + gates * double(state_bytes)) * (grad ? 2.0 : 1.0) +
                       state * double(state_bytes) * states;
  require_memory("apply", "sizes B, T, H, K, V", "tensors and states", bytes);
}

// The inputs, outputs and gradients of a call in the host's memory.
template <class T>
struct Problem {
  DeltaShape shape;
  std::vector<T> q, k, v, beta, erase_key, dout, o, dq, dk, dv, dbeta, derase_key;
  std::vector<State<T>> g, dg, initial_state, dfinal_state, final_state, chunk_states, dinitial_state;
  SavedStates saved;
  std::vector<std::int64_t> cu_seqlens;
  std::int64_t channels = 1;  // of g

  explicit Problem(const ApplyInputs& inputs)
      : shape(inputs.shape),
        q(converted<T>(*inputs.q)),
        k(converted<T>(*inputs.k)),
        v(converted<T>(*inputs.v)),
        beta(converted<T>(*inputs.beta)) {
    if (inputs.erase_key != nullptr) erase_key = converted<T>(*inputs.erase_key);
    if (inputs.dout != nullptr) dout = converted<T>(*inputs.dout);
    if (inputs.g != nullptr) g = converted<State<T>>(*inputs.g);
    if (inputs.decay == Decay::channel) channels = shape.key_dim;
    if (inputs.cu_seqlens != nullptr) cu_seqlens = integers(*inputs.cu_seqlens);
    if (inputs.initial_state != nullptr) initial_state = converted<State<T>>(*inputs.initial_state);
    if (inputs.dfinal_state != nullptr) dfinal_state = converted<State<T>>(*inputs.dfinal_state);
    o.resize(v.size());
    final_state.resize(state_size());
  }

  std::size_t state_size() const { return shape.sequences() * shape.value_heads * shape.key_dim * shape.value_dim; }

  template <class U>
  auto keys(U& x) const {
    return view<4>(x, {shape.batch, shape.tokens, shape.heads, shape.key_dim});
  }
  template <class U>
  auto values(U& x) const {
    return view<4>(x, {shape.batch, shape.tokens, shape.value_heads, shape.value_dim});
  }
  template <class U>
  auto steps(U& x) const {
    return view<3>(x, {shape.batch, shape.tokens, shape.value_heads});
  }
  template <class U>
  auto gates(U& x) const {
    return view<4>(x, {shape.batch, shape.tokens, shape.value_heads, channels});
  }
  template <class U>
  auto states(U& x) const {
    return view<4>(x, {shape.sequences(), shape.value_heads, shape.key_dim, shape.value_dim});
  }
  template <class U>
  auto chunks(U& x) const {
    return view<5>(x, {shape.batch, shape.chunks(saved.interval), shape.value_heads, shape.key_dim, shape.value_dim});
  }
  // Makes room for the states that a backward needs.
  void save_states(const SavedStates& as) {
    saved = as;
    chunk_states.resize(shape.batch * shape.chunks(saved.interval) * shape.value_heads * shape.key_dim *
                        shape.value_dim);
  }
  auto ends() { return view<1>(cu_seqlens, {static_cast<std::int64_t>(cu_seqlens.size())}); }

 private:
  // An empty vector gives a view without data: absent.
  template <int Rank, class U>
  static View<U, Rank> view(std::vector<U>& x, const std::array<std::int64_t, Rank>& extent) {
    return x.empty() ? View<U, Rank>{} : View<U, Rank>::contiguous(x.data(), extent);
  }
};

template <class T>
DeltaForward<T> forward_of(Problem<T>& p, const DeltaRule& rule, Place& place) {
  return {.shape = p.shape,
          .rule = rule,
          .q = place.input(p.keys(p.q)),
          .k = place.input(p.keys(p.k)),
          .v = place.input(p.values(p.v)),
          .beta = place.input(p.steps(p.beta)),
          .g = place.input(p.gates(p.g)),
          .cu_seqlens = place.input(p.ends()),
          .initial_state = place.input(p.states(p.initial_state)),
          .o = place.output(p.values(p.o)),
          .final_state = place.output(p.states(p.final_state)),
          .chunk_states = place.output(p.chunks(p.chunk_states)),
          .saved = p.saved,
          .erase_key = place.input(p.keys(p.erase_key))};
}

template <class T>
DeltaBackward<T> backward_of(Problem<T>& p, const DeltaForward<T>& forward, Place& place) {
  p.dout.resize(p.o.size());  // zeros where only dfinal_state was given
  p.dq.resize(p.q.size());
  p.dk.resize(p.k.size());
  p.dv.resize(p.v.size());
  p.dbeta.resize(p.beta.size());
  p.derase_key.resize(p.erase_key.size());
  p.dg.resize(p.g.size());
  p.dinitial_state.resize(p.state_size());
  DeltaBackward<T> backward = efla::backward_of(forward);
  backward.dout = place.input(p.values(p.dout));
  backward.dfinal_state = place.input(p.states(p.dfinal_state));
  backward.dq = place.output(p.keys(p.dq));
  backward.dk = place.output(p.keys(p.dk));
  backward.dv = place.output(p.values(p.dv));
  backward.dbeta = place.output(p.steps(p.dbeta));
  backward.derase_key = place.output(p.keys(p.derase_key));
  backward.dg = place.output(p.gates(p.dg));
  backward.dinitial_state = place.output(p.states(p.dinitial_state));
  return backward;
}

template <class T>
constexpr TensorType kStoredType = TensorType::F32;
template <>
constexpr TensorType kStoredType<bfloat16> = TensorType::BF16;
template <>
constexpr TensorType kStoredType<double> = TensorType::F64;

template <class T, int Rank>
NamedTensor named(const char* name, const View<T, Rank>& view) {
  return {name,
          kStoredType<T>,
          {view.extent.begin(), view.extent.end()},
          {reinterpret_cast<const std::uint8_t*>(view.data), view.size() * sizeof(T)}};
}

template <class T>
std::vector<NamedTensor> outputs(Problem<T>& p, bool grad, bool channel_decay) {
  std::vector<NamedTensor> all{named("o", p.values(p.o)), named("final_state", p.states(p.final_state))};
  if (grad) {
    all.push_back(named("dq", p.keys(p.dq)));
    all.push_back(named("dk", p.keys(p.dk)));
    all.push_back(named("dv", p.values(p.dv)));
    all.push_back(named("dbeta", p.steps(p.dbeta)));
    if (!p.derase_key.empty()) all.push_back(named("derase_key", p.keys(p.derase_key)));
    if (!p.dg.empty()) {
      all.push_back(named("dg", p.gates(p.dg)));
      if (p.channels == 1 && !channel_decay) all.back().shape.pop_back();
    }
    all.push_back(named("dinitial_state", p.states(p.dinitial_state)));
  }
  return all;
}

// Says on standard error which outputs have values that are not finite.
template <class T>
void report_non_finite(const Problem<T>& p) {
  std::string names;
  const auto look = [&](const char* name, const auto& values) {
    const bool finite =
        std::all_of(values.begin(), values.end(), [](const auto& value) { return std::isfinite(to_float(value)); });
    if (!finite) names.append(names.empty() ? "" : ", ").append(name);
  };
  look("o", p.o);
  look("final_state", p.final_state);
  look("dq", p.dq);
  look("dk", p.dk);
  look("dv", p.dv);
  look("dbeta", p.dbeta);
  look("derase_key", p.derase_key);
  look("dg", p.dg);
  look("dinitial_state", p.dinitial_state);
  if (!names.empty()) print_or_drop(stderr, "efla: apply: inf or NaN in " + names + "\n");
}

// Prints which implementation ran, after those that "auto" passed over.
void print_choice(const char* direction, const Choice& choice) {
  for (const auto& refusal : choice.refusals) {
    fmt::print("{}: not {}: {}\n", direction, refusal.implementation, refusal.reason);
  }
  fmt::print("{}: {}\n", direction, choice.implementation);
}

template <class T>
void apply(const Options& options, const DeltaRule& rule, const ApplyInputs& inputs) {
  check_memory(inputs.shape, rule, options.grad, sizeof(T), sizeof(State<T>));
  Problem<T> problem(inputs);
  const RunOptions run{.implementation = options.implementation, .context = {.device = device_of(options)}};
  if (options.grad) problem.save_states(choose_saved_states<T>(inputs.shape, rule, run));
  Place place(run.context.device);
  const DeltaForward<T> forward = forward_of(problem, rule, place);
  const Choice ran = delta_forward(forward, run);
  if (options.verbose) print_choice("forward", ran);
  if (options.grad) {
    const Choice backward_ran = delta_backward(backward_of(problem, forward, place), run);
    if (options.verbose) print_choice("backward", backward_ran);
  }
  place.fetch_outputs();
  report_non_finite(problem);
  io::write_safetensors(options.out, outputs(problem, options.grad, rule.decay == Decay::channel),
                        {{"efla", std::string(version())},
                         {"step", name_of(rule.step)},
                         {"erase_scale", fmt::format("{}", rule.step.erase_scale)},
                         {"write_scale", fmt::format("{}", rule.step.write_scale)},
                         {"scale", fmt::format("{}", rule.scale_for(inputs.shape.key_dim))},
                         {"decay", std::string(name_of(rule.decay))},
                         {"qk_l2norm", rule.qk_l2norm ? "true" : "false"}});
}

void run(const Options& options) {
  check_name("--impl", options.implementation, selectable_names(delta_forward_implementations()));
  if (options.dtype) check_name("--dtype", *options.dtype, {"float32", "bfloat16"});
  check_device(options);
  DeltaRule rule = rule_of(options);
  if (options.decay) check_name("--decay", *options.decay, {"none", "scalar", "channel"});
  if (options.threads > 0) set_threads(options.threads);
  check_output_file("apply", "--out", options.out, options.in);

  const io::SafetensorsFile file(options.in);
  const ApplyInputs inputs = read_inputs(file);
  rule.decay = inputs.decay;
  rule.two_keys = inputs.erase_key != nullptr;
  if (options.decay && *options.decay != name_of(rule.decay)) {
    throw Error("apply", "--decay", *options.decay,
                std::string(name_of(rule.decay)) + ", by the axes of g in " + file.path());
  }
  if (options.grad && inputs.dout == nullptr && inputs.dfinal_state == nullptr) {
    throw Error("apply", "--grad", "neither dout nor dfinal_state in " + file.path(), "at least one of them");
  }
  if (options.dtype == "bfloat16" || (!options.dtype && inputs.type == TensorType::BF16)) {
    apply<bfloat16>(options, rule, inputs);
  } else if (!options.dtype && inputs.type == TensorType::F64) {
    if (options.implementation != "ref") {
      throw Error("apply", "--impl", options.implementation, "ref for F64 tensors, or --dtype float32 to convert them");
    }
    apply<double>(options, rule, inputs);
  } else {
    apply<float>(options, rule, inputs);
  }
}

}  // namespace

void add_apply(CLI::App& program) {
  auto options = std::make_shared<Options>();
  auto* command = program.add_subcommand(
      "apply", "Run the operator on the tensors of a safetensors file and write the results to another");
  // Descriptions of more than a line are broken here: CLI11 indents each line but breaks none.
  command
      ->add_option("IN", options->in,
                   "File with q, k [B,T,H,K], v [B,T,HV,V] and beta [B,T,HV] of F32, BF16 or F64\n"
                   "(HV a multiple of H) and, where wanted, g [B,T,HV] or [B,T,HV,K], the decay's\n"
                   "logarithm, initial_state [N,HV,K,V], dout [B,T,HV,V], dfinal_state [N,HV,K,V],\n"
                   "erase_key [B,T,H,K], which erases the state in the place of k, and, for N\n"
                   "packed sequences with B = 1, cu_seqlens [N+1] of I64; g and states are F32, or\n"
                   "F64 where q is")
      ->required()
      ->type_name("FILE");
  command->add_option("--out", options->out, "File to write o and final_state to, with --grad also the gradients")
      ->required()
      ->type_name("FILE");
  command->add_option("--step", options->step, "Step size: euler, rkN, exact, implicit_euler or trapezoid")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--erase-scale", options->erase_scale, "Factor on the gain that erases the state")
      ->type_name("NUMBER")
      ->capture_default_str();
  command->add_option("--write-scale", options->write_scale, "Factor on the gain that writes the value")
      ->type_name("NUMBER")
      ->capture_default_str();
  command
      ->add_option("--decay", options->decay,
                   "What g must be: none, scalar or channel (default: whatever its axes say)")
      ->type_name("NAME");
  command->add_flag("--qk-l2norm", options->qk_l2norm,
                    "Divide q and k by their L2 norms first, and erase_key by that of k (default: no)");
  command->add_option("--scale", options->scale, "Factor on the output (default: K^(-1/2))")->type_name("NUMBER");
  command
      ->add_option("--impl", options->implementation,
                   fmt::format("Algorithm, or one of its implementations:\n{}",
                               fmt::join(selectable_names(delta_forward_implementations()), ", ")))
      ->type_name("NAME")
      ->capture_default_str();
  command
      ->add_option("--dtype", options->dtype,
                   "Type to convert to and compute in: float32 or bfloat16 (default: that\n"
                   "of q; only --impl ref computes in F64)")
      ->type_name("NAME");
  command->add_flag("--grad", options->grad,
                    "Also write dq, dk, dv, dbeta, derase_key, dg and dinitial_state (default: no);\n"
                    "needs dout or dfinal_state, and takes the one missing as zeros");
  command->add_option("--device", options->device, "Where to compute: cpu or cuda, the first GPU")
      ->type_name("NAME")
      ->capture_default_str();
  add_threads_option(*command, options->threads);
  command->add_flag("--verbose", options->verbose, "Print which implementation ran and why others did not");
  command->callback([options] { name_option("apply", "--impl", "implementation", [&] { run(*options); }); });
}

}  // namespace efla::cli
