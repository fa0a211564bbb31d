#include "bench/op/ggml_delta.h"

#include <ggml-cpu.h>
#include <ggml.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace efla::bench {
namespace {

struct Free {
  void operator()(ggml_context* context) const { ggml_free(context); }
  void operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }
};

// One call of the operator as a ggml graph. ggml lists extents from the innermost, so our row-major [T, H, K] is its
// [K, H, T].
class Graph {
 public:
  // g undefined: no decay, which is g = 0 in ggml. state [H, K, V].
  Graph(const Inputs& in, const at::Tensor& state, int threads) : in_(in) {
    const DeltaShape s = in.shape();
    const at::Tensor alpha = exact_alpha(in.k.to(at::kDouble), in.beta.to(at::kDouble)).to(at::kFloat);
    const at::Tensor g = in.g.defined() ? in.g : at::zeros({1, s.tokens, s.heads, 1}, at::kFloat);
    const at::Tensor transposed = state.transpose(1, 2);  // ggml stores S by columns: [H, V, K]
    const std::int64_t results = in.v.numel() + state.numel();
    std::int64_t floats = results;
    for (const at::Tensor& x : {in.q, in.k, in.v, g, alpha, transposed}) floats += x.numel();
    constexpr std::size_t kTensors = 16, kAlignment = 64;
    const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float) +
                              kTensors * (ggml_tensor_overhead() + kAlignment) + ggml_graph_overhead();
    context_.reset(ggml_init({.mem_size = bytes, .mem_buffer = nullptr, .no_alloc = false}));
    if (!context_) throw std::runtime_error("ggml_init failed");

    ggml_tensor* const q = tensor(in.q, s.key_dim, s.heads, s.tokens);
    ggml_tensor* const k = tensor(in.k, s.key_dim, s.heads, s.tokens);
    ggml_tensor* const v = tensor(in.v, s.value_dim, s.heads, s.tokens);
    ggml_tensor* const decay = tensor(g, g.size(3), s.heads, s.tokens);
    ggml_tensor* const gain = tensor(alpha, 1, s.heads, s.tokens);
    ggml_tensor* const initial = tensor(transposed, s.key_dim, s.value_dim, s.heads);
    result_ = ggml_gated_delta_net(context_.get(), q, k, v, decay, gain, initial, /*K: states kept*/ 1);
    graph_ = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph_, result_);

    auto parameters = ggml_threadpool_params_default(threads);
    pool_.reset(ggml_threadpool_new(&parameters));
    plan_ = ggml_graph_plan(graph_, threads, pool_.get());
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void run() {
    if (ggml_graph_compute(graph_, &plan_) != GGML_STATUS_SUCCESS)
      throw std::runtime_error("ggml_graph_compute failed");
  }

  at::Tensor o() const {  // [1, T, H, V]
    return at::from_blob(result_->data, in_.v.sizes(), at::kFloat).clone();
  }
  at::Tensor state() const {  // [1, H, K, V]
    const DeltaShape s = in_.shape();
    auto* const after_o = static_cast<float*>(result_->data) + in_.v.numel();
    return at::from_blob(after_o, {1, s.heads, s.value_dim, s.key_dim}, at::kFloat).transpose(2, 3).contiguous();
  }

 private:
  ggml_tensor* tensor(const at::Tensor& values, std::int64_t inner, std::int64_t middle, std::int64_t outer) {
    ggml_tensor* const made = ggml_new_tensor_4d(context_.get(), GGML_TYPE_F32, inner, middle, outer, 1);
    const at::Tensor flat = values.contiguous();
    std::memcpy(made->data, flat.data_ptr<float>(), ggml_nbytes(made));
    return made;
  }

  Inputs in_;
  std::unique_ptr<ggml_context, Free> context_;
  std::unique_ptr<ggml_threadpool, Free> pool_;
  ggml_tensor* result_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_{};
  std::vector<std::uint8_t> work_;
};

Inputs first_token(const Inputs& in) {
  const auto first = [](const at::Tensor& x) { return x.defined() ? x.narrow(1, 0, 1) : x; };
  return {first(in.q), first(in.k), first(in.v), first(in.beta), first(in.dout), in.initial_state, first(in.g)};
}

}  // namespace

std::string ggml_version_text() { return std::string(ggml_version()) + ", commit " + ggml_commit(); }

Contender ggml_forward(const Inputs& inputs, int threads) {
  const auto graph = std::make_shared<Graph>(inputs, at::zeros_like(inputs.initial_state[0]), threads);
  return {[graph] { graph->run(); }, [graph] { return Outputs{{"o", graph->o()}, {"final_state", graph->state()}}; }};
}

Contender ggml_step(const Inputs& inputs, int threads) {
  const auto graph = std::make_shared<Graph>(first_token(inputs), inputs.initial_state[0], threads);
  return {[graph] { graph->run(); },
          [graph] {
            return Outputs{{"o", graph->o().select(1, 0)}, {"state", graph->state()}};
          }};
}

}  // namespace efla::bench
