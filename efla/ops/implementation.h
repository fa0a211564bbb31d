// The lists from which the operations choose their kernels, and the choice. An operation has one ordered list of rows
// (ops/delta.cc, ops/layers/short_conv.cc and so on). Commands, the Python package and tests read the lists of the
// delta rule.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/ops/context.h"
#include "efla/rule/problem.h"

namespace efla {

// One row of an operation's list: one kernel on one kind of device.
template <class Problem>
struct Implementation {
  const char* name;       // unique in the list, for example "chunk_amx"
  const char* algorithm;  // "chunk", "recurrent" and so on; rows of several kernels or devices may have the same
  Device::Kind device;    // on which the tensors of a problem must lie
  // Returns in words why the row does not take a problem, or "". If the row or its algorithm was named, it refuses only
  // what it cannot compute. For "auto" (not `named`) the row also refuses problems for which a later row is faster or
  // more exact.
  std::string (*refuse)(const Problem& problem, bool named);
  // Computes a validated problem that the row does not refuse.
  void (*run)(const Problem& problem, const ExecutionContext& context);
  SavedStates saved = {};  // of the delta rule: how its forward saves states
};

// Why a row was passed over.
struct Refusal {
  std::string_view implementation;
  std::string reason;
};

// The row that ran, or that a run would take.
struct Choice {
  std::string_view implementation;  // the row's name
  std::string_view algorithm;
  Device::Kind device = Device::Kind::cpu;
  SavedStates saved = {};         // of the delta rule's forward
  std::vector<Refusal> refusals;  // rows before this row that compute on the same kind of device, in their order
};

struct RunOptions {
  // "auto": the first row that takes the problem; the name of a row; or an algorithm, of which the first row that takes
  // the problem runs.
  std::string_view implementation = "auto";
  ExecutionContext context = {};
};

// A row without its functions.
struct ImplementationName {
  std::string_view name, algorithm;
  Device::Kind device;
};

// Returns "auto", the algorithms and the rows of a list: everything that RunOptions::implementation may be.
std::vector<std::string> selectable_names(const std::vector<ImplementationName>& rows);

// Makes the tensors' GPU the current device while the object lives, because kernels query the limits of the current
// device. Does nothing for tensors on the CPU.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Device& tensors);
  ~OnDeviceOf();
  OnDeviceOf(const OnDeviceOf&) = delete;
  OnDeviceOf& operator=(const OnDeviceOf&) = delete;

 private:
  int before_ = -1;  // the GPU to return to; −1: none
};

// Returns the rows without their functions.
template <class Problem>
std::vector<ImplementationName> names_of(std::span<const Implementation<Problem>> rows) {
  std::vector<ImplementationName> names;
  for (const auto& row : rows) names.push_back({row.name, row.algorithm, row.device});
  return names;
}

// Returns whether the options ask for a row: with "auto", its name or its algorithm.
inline bool is_asked(const RunOptions& options, std::string_view name, std::string_view algorithm) {
  return options.implementation == "auto" || options.implementation == name || options.implementation == algorithm;
}

// Throws Error for an implementation that is not in the list, or with the reasons of all rows that were asked: the
// refusals, and for rows of another kind of device that the tensors are not there.
[[noreturn]] void throw_no_implementation(const char* operation, const RunOptions& options,
                                          const std::vector<ImplementationName>& rows,
                                          const std::vector<Refusal>& refusals);

// Returns why a row does not compute a validated problem, or "" if it does. Returns no value if the options name other
// rows, or the row is for another kind of device.
template <class Problem>
std::optional<std::string> refusal_of(const Implementation<Problem>& row, const Problem& problem,
                                      const RunOptions& options) {
  if (row.device != options.context.device.kind || !is_asked(options, row.name, row.algorithm)) return std::nullopt;
  const OnDeviceOf current(options.context.device);
  return row.refuse(problem, options.implementation != "auto");
}

// Returns the first row that computes a validated problem and fills `choice`; nullptr if there is none.
template <class Problem>
const Implementation<Problem>* find_row(std::type_identity_t<std::span<const Implementation<Problem>>> rows,
                                        const Problem& problem, const RunOptions& options, Choice& choice) {
  for (const auto& row : rows) {
    std::optional<std::string> reason = refusal_of(row, problem, options);
    if (!reason) continue;
    if (reason->empty()) {
      choice.implementation = row.name;
      choice.algorithm = row.algorithm;
      choice.device = row.device;
      choice.saved = row.saved;
      return &row;
    }
    choice.refusals.push_back({row.name, std::move(*reason)});
  }
  return nullptr;
}

// Returns the row that `find_row` finds. Throws Error if there is none.
template <class Problem>
const Implementation<Problem>& choose(const char* operation,
                                      std::type_identity_t<std::span<const Implementation<Problem>>> rows,
                                      const Problem& problem, const RunOptions& options, Choice& choice) {
  const auto* row = find_row(rows, problem, options, choice);
  if (row == nullptr) throw_no_implementation(operation, options, names_of(rows), choice.refusals);
  return *row;
}

// Returns whether any row computes a validated problem.
template <class Problem>
bool takes(std::type_identity_t<std::span<const Implementation<Problem>>> rows, const Problem& problem,
           const RunOptions& options) {
  Choice choice;
  return find_row(rows, problem, options, choice) != nullptr;
}

// Runs the row that `choose` returns, and returns the choice.
template <class Problem>
Choice choose_and_run(const char* operation, std::type_identity_t<std::span<const Implementation<Problem>>> rows,
                      const Problem& problem, const RunOptions& options) {
  Choice choice;
  choose(operation, rows, problem, options, choice).run(problem, options.context);
  return choice;
}

// Refuses every problem for "auto"; for rows `ref`.
template <class Problem>
std::string refuse_unless_named(const Problem&, bool named) {
  return named ? "" : "the float64 reference runs only when asked for by name";
}

// The functions of a row of efla/cuda in a build without CUDA kernels.
template <class Problem>
std::string refuse_without_cuda(const Problem&, bool) {
  return "this build has no CUDA kernel for it";
}
template <class Problem>
void run_nothing(const Problem&, const ExecutionContext&) {}

// The functions of a row of efla/cuda, for a list over problems of the type Problem. A build without CUDA kernels has
// the row too and refuses there.
#ifdef EFLA_HAS_CUDA
#define EFLA_CUDA_ROW(refuse, run) refuse, run
#else
#define EFLA_CUDA_ROW(refuse, run) refuse_without_cuda<Problem>, run_nothing<Problem>
#endif

}  // namespace efla
