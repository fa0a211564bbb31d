// The product of a few rows with a weight matrix, with what stands before and after it in a layer. Decoding reads every
// weight of a model once per step, so that the kernel is bound by that.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "efla/rule/linear.h"

namespace efla::gpu {

// For Hopper GPUs and weights in float32 or bfloat16. Sums are in float32: of float32 weights by multiply-adds; of
// bfloat16 weights on the tensor cores, with every x as the sum of two bfloat16 numbers. A row has the same bits
// whatever other rows there are, up to 8 of them; more rows are added in another order.
//
// The kernel reads weight and norm_weight while the kernels before it still run, which must therefore not write them.
void linear(const LinearForward& problem, cudaStream_t stream);

// The kernels of `linear` for up to 8 rows, and for up to 64 rows.
void linear_few(const LinearForward& problem, cudaStream_t stream);
void linear_many(const LinearForward& problem, cudaStream_t stream);

// Return what of the problem a kernel does not take, which has aligned rows and weights in float32 or bfloat16, or "".
std::string linear_few_refusal(const LinearForward& problem);
std::string linear_many_refusal(const LinearForward& problem);

// Returns what of the problem `linear` does not take on the current device, as a sentence, or "".
std::string linear_refusal(const LinearForward& problem);

}  // namespace efla::gpu
