// The product of a few rows with a weight matrix, with the operations before and after it in a layer, on Hopper GPUs.
// rule/linear.h has shapes and equations, docs/ops/linear.md and docs/design/2026-11-cuda-decode.md explain the
// kernels. A decode step reads every weight of a model once, which takes most of its time.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "efla/rule/linear.h"

namespace efla::gpu {

// Computes y for weights in float32 or bfloat16. Sums are in float32: with float32 weights by multiply-adds, with
// bfloat16 weights on the tensor cores, where every x is the sum of two bfloat16 numbers. With at most 8 rows, or fewer
// where the columns are many, the bits of a row do not depend on the other rows. With more rows the sums are added in
// another order. A product alone or with a residual whose columns exceed the shared memory is the sum of products of
// some columns. Takes problems for which linear_refusal returns "". Throws CudaError where the launch fails.
//
// The kernels read weight and norm_weight while earlier kernels in the stream still run; these kernels must not write
// them.
void linear(const LinearForward& problem, cudaStream_t stream);

// Launch the kernel of `linear` for up to 8 rows (4 with a float32 weight), and the kernel for up to 64 rows.
void linear_few(const LinearForward& problem, cudaStream_t stream);
void linear_many(const LinearForward& problem, cudaStream_t stream);

// Return what a kernel does not take of a problem with aligned rows and a weight in float32 or bfloat16, as a sentence,
// or "". The kernel for many rows takes a weight in bfloat16 only.
std::string linear_few_refusal(const LinearForward& problem);
std::string linear_many_refusal(const LinearForward& problem);

// Returns what `linear` does not take of a problem on the current device, as a sentence, or "".
std::string linear_refusal(const LinearForward& problem);

}  // namespace efla::gpu
