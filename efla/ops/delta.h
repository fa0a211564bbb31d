// The delta rule: validates a problem, chooses a row of the operation's list, runs it and returns which one ran.
//
//   DeltaForward<float> p = …;                                   // views of q, k, v, beta, o (rule/problem.h)
//   Choice ran = delta_forward(p);                               // the process's thread pool
//   Choice ran = delta_forward(p, {.implementation = "chunk"});  // the first row of this algorithm
//
// A forward whose states a backward needs asks first how they are saved:
//
//   RunOptions options = …;
//   p.saved = choose_saved_states<T>(p.shape, p.rule, options);  // then allocate p.chunk_states
//   delta_forward(p, options);                                   // runs the same row
//
// A backend is its folder, its part of CMake and one row per list. For example, a CUDA kernel that saves a bfloat16
// state per 64 tokens is this row of forward_rows in delta.cc:
//
//   {"chunk_cuda", "chunk", Device::Kind::cuda,
//    EFLA_CUDA_ROW(refuse_cuda_chunk_forward<T>, run_cuda_chunk_forward<T>),  // both in delta_cuda.h
//    kSaved}  // constexpr SavedStates kSaved{.interval = 64};
//
// Nothing else changes: commands, Python and tests read the list, and a row is never asked about tensors elsewhere. A
// build without nvcc has the row too, which then refuses.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/problem.h"

namespace efla {

// Forward over T tokens: outputs, and the final and the saved states where their views are present.
// T: float, bfloat16, float16 (on a GPU; on the CPU "ref" alone takes it), or double ("ref" alone computes in double;
// the others refuse it).
// Throws Error for a bad argument or an implementation that refuses the problem. Equations 20 and 21 to 32 of the EFLA
// paper.
template <class T>
Choice delta_forward(const DeltaForward<T>& problem, const RunOptions& options = {});

// Returns what delta_forward would run for a problem with saved states, computing nothing. The problem's views may be
// absent.
template <class T>
Choice choose_delta_forward(const DeltaForward<T>& problem, const RunOptions& options = {});

// Returns how delta_forward saves the states that delta_backward needs. Throws Error where no row computes the forward,
// or none the backward.
template <class T>
SavedStates choose_saved_states(const DeltaShape& shape, const DeltaRule& rule, const RunOptions& options = {});

// Gradients of every input, from the states that the forward saved.
template <class T>
Choice delta_backward(const DeltaBackward<T>& problem, const RunOptions& options = {});

// Decoding: one token per batch entry, the state updated in place. S, of the state: State<T> or bfloat16.
template <class T, class S>
Choice delta_step(const DeltaStep<T, S>& problem, const RunOptions& options = {});

// Decoding: a few tokens per batch entry. The same bits as one delta_step per token.
template <class T, class S>
Choice delta_steps(const DeltaSteps<T, S>& problem, const RunOptions& options = {});

// Return the lists, in the order in which "auto" asks their rows.
std::vector<ImplementationName> delta_forward_implementations();
std::vector<ImplementationName> delta_step_implementations();

}  // namespace efla
