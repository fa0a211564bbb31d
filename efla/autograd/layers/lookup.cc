#include "efla/autograd/layers/lookup.h"

#include <torch/csrc/autograd/custom_function.h>

#include "efla/autograd/tensor_view.h"

namespace efla::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// For tables of more rows the product with a matrix of zeros and ones takes longer than sorting the ids.
constexpr std::int64_t kSmallTable = 256;

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& table, const Tensor& ids) {
    ctx->save_for_backward({ids});
    ctx->saved_data["rows"] = table.size(0);
    return at::embedding(table, ids);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order("embedding");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor ids = ctx->get_saved_variables()[0].flatten(), d = rows_of(grads[0]);
    const Tensor rows = at::arange(ctx->saved_data["rows"].toInt(), ids.options()).unsqueeze(1);
    return {at::mm(rows.eq(ids).to(d.scalar_type()), d), {}};
  }
};

struct RowsAtFunction : torch::autograd::Function<RowsAtFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& places) {
    ctx->save_for_backward({places});
    ctx->saved_data["rows"] = x.size(0);
    return x.index_select(0, places);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_order("rows_at");
    const Tensor places = ctx->get_saved_variables()[0], &d = grads[0];
    const std::int64_t count = places.size(0);
    const Tensor rows = at::arange(ctx->saved_data["rows"].toInt(), places.options());
    const Tensor first = at::searchsorted(places, rows);  // the first place that is not below a row, or count
    const Tensor found = places.index_select(0, first.clamp_max(count - 1)).eq(rows);
    const Tensor zero = at::zeros({1, d.size(1)}, d.options());
    return {at::cat({d, zero}).index_select(0, first.masked_fill(found.logical_not(), count)), {}};
  }
};

}  // namespace

Tensor embedding(const Tensor& table, const Tensor& ids) {
  const bool few = table.is_cuda() && table.size(0) <= kSmallTable && table.scalar_type() == at::kFloat;
  return few ? EmbeddingFunction::apply(table, ids) : at::embedding(table, ids);
}

Tensor rows_at(const Tensor& x, const Tensor& places) { return RowsAtFunction::apply(x, places); }

}  // namespace efla::autograd
