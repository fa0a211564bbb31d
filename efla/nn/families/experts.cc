#include "efla/nn/families/experts.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "efla/ops/layers/glu.h"
#include "efla/rule/activation.h"

namespace efla::nn {
namespace {

// Lets the system take the memory of a matrix that is not read again. Pages of a file come back if they are.
void release(const StoredMatrix& matrix) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = matrix.narrow ? std::bit_cast<std::uintptr_t>(matrix.narrow.data)
                                   : std::bit_cast<std::uintptr_t>(matrix.wide.data);
  const auto bytes = matrix.narrow ? matrix.narrow.size() * std::int64_t{sizeof(bfloat16)}
                                   : matrix.wide.size() * std::int64_t{sizeof(float)};
  const auto begin = (first + page - 1) / page * page;
  const auto end = (first + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (begin < end) ::madvise(std::bit_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace

PackedWeight packed(std::span<const StoredMatrix> matrices, WeightType type) {
  PackedWeight weight(matrices, type, true);
  for (const auto& matrix : matrices) {
    const bool copied = is_integer(type) || (type == WeightType::bfloat16 && !matrix.narrow);
    if (copied && !matrix.keep) release(matrix);
  }
  return weight;
}

RowsMlp::RowsMlp(const MlpTensors& tensors, WeightType weights)
    : gate_up_(packed(tensors.gate_up, weights)), down_(packed(std::span(&tensors.down, 1), weights)) {}

void RowsMlp::apply(const View<const float, 2>& x, const View<float, 2>& y, MlpRows& rows, ThreadPool& pool) const {
  const std::int64_t count = x.extent[0], inner = gate_up_.outputs() / 2;
  const View<float, 2> both = rows.inner.rows(count, 2 * inner), product = rows.product.rows(count, inner);
  gate_up_.apply(x, both, pool);
  glu_forward<float>({columns_of(both, {0, inner}), columns_of(both, {inner, inner}), product},
                     {.context = {.pool = &pool}});
  down_.apply(product, y, pool);
}

Experts::Experts(const ExpertTensors& tensors, const ExpertsConfig& config, WeightType weights)
    : config_(config),
      router_(packed(std::span(&tensors.router, 1), weights)),
      shared_gate_(packed(std::span(&tensors.shared_gate, 1), weights)),
      shared_(tensors.shared, weights) {
  for (const auto& expert : tensors.experts) experts_.emplace_back(expert, weights);
}

std::size_t Experts::bytes() const {
  std::size_t total = router_.bytes() + shared_gate_.bytes() + shared_.bytes();
  for (const auto& expert : experts_) total += expert.bytes();
  return total;
}

// Returns the uses of each expert, in the order of the rows.
std::vector<std::vector<Experts::Use>> Experts::route(const View<float, 2>& x, MlpRows& rows, ThreadPool& pool) const {
  const View<float, 2> scores = rows.scores.rows(x.extent[0], config_.count);
  router_.apply(x, scores, pool);
  std::vector<std::vector<Use>> uses(experts_.size());
  std::vector<std::size_t> order(experts_.size());
  for (std::int64_t row = 0; row < x.extent[0]; ++row) {
    const std::span p(scores.at(row), experts_.size());
    const float largest = *std::ranges::max_element(p);
    float sum = 0.0F;
    for (auto& score : p) sum += score = std::exp(score - largest);
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto end = order.begin() + config_.per_token;
    std::partial_sort(order.begin(), end, order.end(),
                      [&](std::size_t a, std::size_t b) { return p[a] > p[b] || (p[a] == p[b] && a < b); });
    if (config_.normalised) {
      sum = 0.0F;
      for (auto e = order.begin(); e != end; ++e) sum += p[*e];
    }
    for (auto e = order.begin(); e != end; ++e) uses[*e].push_back({row, p[*e] / sum});
  }
  return uses;
}

void Experts::apply(const View<float, 2>& x, MlpRows& rows, ThreadPool& pool) const {
  const std::int64_t count = x.extent[0], width = x.extent[1];
  const auto uses = route(x, rows, pool);
  const View<float, 2> gates = rows.gates.rows(count, 1), shared = rows.shared.rows(count, width);
  shared_gate_.apply(x, gates, pool);
  shared_.apply(x, shared, rows, pool);
  const View<float, 2> y = rows.output.rows(count, width);
  std::fill_n(y.data, y.size(), 0.0F);
  for (std::size_t e = 0; e < uses.size(); ++e) {
    if (uses[e].empty()) continue;
    const View<float, 2> picked = rows.picked.rows(std::ssize(uses[e]), width);
    for (std::int64_t i = 0; i < picked.extent[0]; ++i) {
      std::copy_n(x.at(uses[e][static_cast<std::size_t>(i)].row), width, picked.at(i));
    }
    experts_[e].apply(picked, picked, rows, pool);
    for (std::int64_t i = 0; i < picked.extent[0]; ++i) {
      const auto [row, weight] = uses[e][static_cast<std::size_t>(i)];
      for (std::int64_t d = 0; d < width; ++d) y(row, d) += weight * picked(i, d);
    }
  }
  for (std::int64_t row = 0; row < count; ++row) {
    const float gate = sigmoid(gates(row, 0));
    for (std::int64_t d = 0; d < width; ++d) x(row, d) = y(row, d) + gate * shared(row, d);
  }
}

LayerMlp::LayerMlp(const LayerTensors& tensors, const ExpertsConfig& config, WeightType weights) {
  if (tensors.experts) {
    experts_.emplace(*tensors.experts, config, weights);
  } else {
    mlp_ = RowsMlp(tensors.mlp, weights);
  }
}

void LayerMlp::apply(const View<float, 2>& x, MlpRows& rows, ThreadPool& pool) const {
  experts_ ? experts_->apply(x, rows, pool) : mlp_.apply(x, x, rows, pool);
}

}  // namespace efla::nn
