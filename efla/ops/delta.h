// The public operator: validates a problem, chooses an implementation, runs it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "efla/base/threads.h"
#include "efla/rule/problem.h"

namespace efla {

// Why an implementation was passed over.
struct Refusal {
  std::string implementation, reason;
};

struct RunOptions {
  std::string_view implementation = "auto";  // "auto", "chunk", "recurrent" or "ref"
  ThreadPool* pool = nullptr;                // nullptr: the process's own pool (default_pool)
  std::vector<Refusal>* refusals = nullptr;  // where the reasons of those passed over go
};

// Forward over T tokens: outputs, and the final and the chunk states where their views are present.
// T: float, bfloat16, or double ("ref" alone computes in double; the others refuse it).
// Throws Error for a bad argument or an implementation that refuses the problem. Equations 20 and 21 to 32 of the EFLA
// paper.
template <class T>
void delta_forward(const DeltaForward<T>& problem, const RunOptions& options = {});

// Gradients of every input, from the chunk states that the forward saved.
template <class T>
void delta_backward(const DeltaBackward<T>& problem, const RunOptions& options = {});

// Decoding: one token a batch entry, the state updated in place. S, of the state: State<T> or bfloat16.
template <class T, class S>
void delta_step(const DeltaStep<T, S>& problem, const RunOptions& options = {});

// The pool that operators use when told of no other; as many threads as processors, or as set_threads says.
ThreadPool& default_pool();

// Replaces the default pool; not while an operator runs. threads in [1, 1024].
void set_threads(int threads);

// Names that RunOptions::implementation takes, in the order in which "auto" tries them.
std::vector<std::string> delta_implementations();

}  // namespace efla
