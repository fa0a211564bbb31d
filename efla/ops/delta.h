// The delta rule: validates a problem, chooses an implementation, a row of the operation's list (implementation.h),
// runs this row and returns which row ran. docs/ops/delta_rule.md describes the operator and its implementations.
//
//   DeltaForward<float> p = …;                                   // views of q, k, v, beta, o (rule/problem.h)
//   Choice ran = delta_forward(p);                               // on the process's thread pool
//   Choice ran = delta_forward(p, {.implementation = "chunk"});  // the first row of this algorithm
//
// A forward whose states a backward needs must first be told how to save them:
//
//   RunOptions options = …;
//   p.saved = choose_saved_states<T>(p.shape, p.rule, options);  // then allocate p.chunk_states
//   delta_forward(p, options);                                   // runs the same row
//
// A new backend needs a folder with kernels, its part of CMake and one row per list. For example, a CUDA kernel that
// saves a state per 64 tokens is this row of forward_rows in delta.cc:
//
//   {"chunk_cuda", "chunk", Device::Kind::cuda,
//    EFLA_CUDA_ROW(refuse_cuda_chunk_forward<T>, run_cuda_chunk_forward<T>),  // both in delta_cuda.h
//    kSaved}  // constexpr SavedStates kSaved{.interval = 64};
//
// Nothing else changes, because commands, Python and tests read the list. A row is never asked about tensors on another
// kind of device. A build without nvcc has the row too, and the row refuses every problem.
#pragma once

#include <vector>

#include "efla/ops/implementation.h"
#include "efla/rule/problem.h"

namespace efla {

// Computes the outputs of a forward over T tokens, and the final and the saved states if their views are present:
// equation 20 of EFLA, or equations 21 to 32 by chunks. The element type is float, bfloat16, float16 (on the CPU only
// "ref" takes it) or double (only "ref" takes it). Throws Error for a bad argument or if no implementation takes the
// problem, and CudaError for failures on a GPU; so do the functions below.
template <class T>
Choice delta_forward(const DeltaForward<T>& problem, const RunOptions& options = {});

// Returns the row that delta_forward would run for a problem with saved states, and computes nothing. The problem's
// views may be absent. Throws Error.
template <class T>
Choice choose_delta_forward(const DeltaForward<T>& problem, const RunOptions& options = {});

// Returns how delta_forward saves the states that delta_backward needs. Throws Error if no row computes the forward, or
// no row the backward.
template <class T>
SavedStates choose_saved_states(const DeltaShape& shape, const DeltaRule& rule, const RunOptions& options = {});

// Computes the gradients of every input, from the states that the forward saved (docs/equations.md, the backward).
template <class T>
Choice delta_backward(const DeltaBackward<T>& problem, const RunOptions& options = {});

// Computes a decode step of one token per batch entry and updates the state in place. S, the type of the state, is
// State<T> or bfloat16; double takes only double.
template <class T, class S>
Choice delta_step(const DeltaStep<T, S>& problem, const RunOptions& options = {});

// Computes decode steps of a few tokens per batch entry, with the bits of one delta_step per token.
template <class T, class S>
Choice delta_steps(const DeltaSteps<T, S>& problem, const RunOptions& options = {});

// Return the lists, in the order in which "auto" asks their rows.
std::vector<ImplementationName> delta_forward_implementations();
std::vector<ImplementationName> delta_step_implementations();

}  // namespace efla
