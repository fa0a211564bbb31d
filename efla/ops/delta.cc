#include "efla/ops/delta.h"

#include <array>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>

#include "efla/base/error.h"
#include "efla/cpu/delta.h"
#include "efla/ref/delta.h"
#include "efla/rule/validate.h"

namespace efla {
namespace {

std::mutex pool_mutex;
std::unique_ptr<ThreadPool> process_pool;

// Aligned scratch for one call.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(cpu::kAlignment)))) {}
  cpu::Workspace workspace() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(cpu::kAlignment)); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// One way of computing an operation. `refuse` says in words why it does not take a problem ("" if it does).
template <class Problem>
struct Implementation {
  const char* name;
  std::string (*refuse)(const Problem& problem, bool named);
  void (*run)(const Problem& problem, ThreadPool& pool);
};

template <class Problem>
std::string only_when_named(const Problem&, bool named) {
  return named ? "" : "the float64 reference runs only when asked for by name";
}

template <class T>
std::string no_float64(const char* name) {
  return std::is_same_v<T, double> ? std::string(name) + " computes in float32; float64 inputs need ref" : "";
}

template <class Problem, class T>
std::string refuse_chunk_forward(const Problem& problem, bool named) {
  if constexpr (!std::is_same_v<T, double>) {
    if (!named && !cpu::chunk_fwd_is_faster(problem)) {
      return "recurrent is faster for keys of " + std::to_string(problem.shape.key_dim) + " dimensions and " +
             std::to_string(problem.shape.tokens) + " tokens";
    }
  }
  return no_float64<T>("chunk");
}

// With keys of one or two dimensions the sums between chunks may cancel (docs/numerics.md), and the recurrence is no
// slower.
template <class Problem, class T>
std::string refuse_chunk_backward(const Problem& problem, bool named) {
  if (!named && problem.shape.key_dim <= 2) return "chunk is less exact for keys of one or two dimensions";
  return no_float64<T>("chunk");
}

// The SIMD kernels exist for float32 and bfloat16.
#define EFLA_CPU_KERNEL(T, function)                                                                       \
  [](const auto& problem, [[maybe_unused]] ThreadPool& pool) {                                             \
    if constexpr (!std::is_same_v<T, double>) {                                                            \
      const Scratch scratch(cpu::function##_workspace_bytes(problem.shape, problem.rule, pool.threads())); \
      cpu::function(problem, scratch.workspace(), pool);                                                   \
    }                                                                                                      \
  }

// The first implementation in the list that takes the problem, or the one asked for.
template <class Problem, std::size_t N>
void choose_and_run(const char* operation, const std::array<Implementation<Problem>, N>& list, const Problem& problem,
                    const RunOptions& options) {
  validate(problem);
  const bool named = options.implementation != "auto";
  std::string names = "auto", reasons;
  for (const auto& implementation : list) {
    names += std::string(", ") + implementation.name;
    if (named && options.implementation != implementation.name) continue;
    const std::string reason = implementation.refuse(problem, named);
    if (reason.empty()) return implementation.run(problem, options.pool != nullptr ? *options.pool : default_pool());
    if (options.refusals != nullptr) options.refusals->push_back({implementation.name, reason});
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  const std::string got = "'" + std::string(options.implementation) + "'";
  if (reasons.empty()) throw Error(operation, "implementation", got, "one of " + names);
  throw Error(operation, "implementation", got, "one that takes this problem (" + reasons + ")");
}

}  // namespace

template <class T>
void delta_forward(const DeltaForward<T>& problem, const RunOptions& options) {
  using Problem = DeltaForward<T>;
  static const std::array<Implementation<Problem>, 3> list{{
      {"chunk", refuse_chunk_forward<Problem, T>, EFLA_CPU_KERNEL(T, chunk_fwd)},
      {"recurrent", [](const Problem&, bool) { return no_float64<T>("recurrent"); }, EFLA_CPU_KERNEL(T, recurrent_fwd)},
      {"ref", only_when_named<Problem>, [](const Problem& p, ThreadPool&) { ref::recurrent_fwd(p); }},
  }};
  choose_and_run("delta_forward", list, problem, options);
}

template <class T>
void delta_backward(const DeltaBackward<T>& problem, const RunOptions& options) {
  using Problem = DeltaBackward<T>;
  static const std::array<Implementation<Problem>, 3> list{{
      {"chunk", refuse_chunk_backward<Problem, T>, EFLA_CPU_KERNEL(T, chunk_bwd)},
      {"recurrent", [](const Problem&, bool) { return no_float64<T>("recurrent"); }, EFLA_CPU_KERNEL(T, recurrent_bwd)},
      {"ref", only_when_named<Problem>, [](const Problem& p, ThreadPool&) { ref::recurrent_bwd(p); }},
  }};
  choose_and_run("delta_backward", list, problem, options);
}

template <class T, class S>
void delta_step(const DeltaStep<T, S>& problem, const RunOptions& options) {
  using Problem = DeltaStep<T, S>;
  static const std::array<Implementation<Problem>, 2> list{{
      {"recurrent", [](const Problem&, bool) { return no_float64<T>("recurrent"); }, EFLA_CPU_KERNEL(T, step)},
      {"ref", only_when_named<Problem>, [](const Problem& p, ThreadPool&) { ref::step(p); }},
  }};
  choose_and_run("delta_step", list, problem, options);
}

#undef EFLA_CPU_KERNEL

#define EFLA_INSTANTIATE(T)                                                 \
  template void delta_forward(const DeltaForward<T>&, const RunOptions&);   \
  template void delta_backward(const DeltaBackward<T>&, const RunOptions&); \
  template void delta_step(const DeltaStep<T, State<T>>&, const RunOptions&);
EFLA_INSTANTIATE(float)
EFLA_INSTANTIATE(bfloat16)
EFLA_INSTANTIATE(double)
#undef EFLA_INSTANTIATE
template void delta_step(const DeltaStep<float, bfloat16>&, const RunOptions&);
template void delta_step(const DeltaStep<bfloat16, bfloat16>&, const RunOptions&);

ThreadPool& default_pool() {
  const std::lock_guard lock(pool_mutex);
  if (!process_pool) process_pool = std::make_unique<ThreadPool>(available_processors());
  return *process_pool;
}

void set_threads(int threads) {
  if (threads < 1 || threads > 1024) throw Error("set_threads", "threads", std::to_string(threads), "1 to 1024");
  const std::lock_guard lock(pool_mutex);
  process_pool = std::make_unique<ThreadPool>(threads);
}

std::vector<std::string> delta_implementations() { return {"chunk", "recurrent", "ref"}; }

}  // namespace efla
