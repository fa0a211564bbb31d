// Returns rows of a matrix by their numbers, with gradients that have the same bits in every run and need no sorting on
// a GPU.
#pragma once

#include <ATen/ATen.h>

namespace efla::autograd {

// Returns the rows `ids` [...] int64 of the table [V, D]: [..., D]. On a GPU the gradient of a float32 table of at most
// 256 rows is the product of a matrix of zeros and ones with the gradient of the result. LibTorch computes every other
// gradient.
at::Tensor embedding(const at::Tensor& table, const at::Tensor& ids);

// Returns the rows of x [N, D] at M ≥ 1 places [M] int64 in ascending order: [M, D]. A place may occur several times if
// only the first of its rows has a gradient other than zero.
at::Tensor rows_at(const at::Tensor& x, const at::Tensor& places);

}  // namespace efla::autograd
