// The prefill of GpuFamilyModel.
#include <algorithm>
#include <cmath>
#include <utility>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/layers/add_rms_norm.h"
#include "efla/autograd/layers/decay_gate.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/tensor_view.h"
#include "efla/nn/families/gpu_family_layer.h"
#include "efla/nn/families/gpu_family_model.h"
#include "efla/nn/layers/attention.h"
#include "efla/ops/attention_step.h"
#include "efla/ops/layers/glu.h"
#include "efla/ops/layers/short_conv.h"
#include "efla/torch/autocast.h"
#include "efla/torch/context.h"
#include "efla/torch/tensor_copies.h"

namespace efla::nn {

using autograd::view_of;
using autograd::with_dtype;
using torch::Tensor;

namespace {

using Numbers = std::vector<std::int64_t>;

// Returns the options of an operator that on the CPU only the reference takes in all types.
RunOptions options_of(const Tensor& tensor) { return {tensor.is_cpu() ? "ref" : "auto", libtorch::context_of(tensor)}; }

// Returns the convolution of the first channels of inputs [T, ·] of packed sequences: [T, channels].
Tensor short_conv_of(const Tensor& inputs, const Tensor& taps, const Tensor& cu_seqlens) {
  const Tensor columns = inputs.narrow(1, 0, taps.size(0)).unsqueeze(0);
  const Tensor y = torch::empty(columns.sizes(), inputs.options());
  with_dtype(inputs.scalar_type(), [&]<class T>(T) {
    ShortConvForward<T> p;
    p.x = view_of<const T, 3>(columns);
    p.weight = view_of<const float, 2>(taps);
    p.y = view_of<T, 3>(y);
    p.cu_seqlens = view_of<const std::int64_t, 1>(cu_seqlens);
    short_conv_forward(p, {.context = libtorch::context_of(y)});
  });
  return y[0];
}

// The residual stream of a call, and the branch that has not been added yet.
struct Residual {
  Tensor x, branch = {};

  // Adds the branch. Returns the input of the next one, in a type.
  Tensor next(const Tensor& norm, double eps, torch::ScalarType type) {
    if (!norm.defined()) {
      settle();
      return x.to(type);
    }
    const auto [sum, normed] = autograd::add_rms_norm(x, std::exchange(branch, Tensor()), norm, eps);
    x = sum;
    return normed.to(type);
  }
  void settle() {
    if (branch.defined()) x = x + std::exchange(branch, Tensor());
  }
};

}  // namespace

GpuFamilyModel::Prompts::Prompts(std::span<const TextRun> given, const FamilyConfig& config, torch::Device device)
    : runs(given) {
  const std::int64_t kept = config.mixer.conv - 1, before = std::ssize(runs) * kept;
  Numbers ends{0}, slots_of, positions_of, slots_of_runs, rows, last, edges, edge_ends{0};
  for (std::int64_t n = 0; n < std::ssize(runs); ++n) {
    const TextRun& run = runs[static_cast<std::size_t>(n)];
    const std::int64_t first = ends.back(), some = std::min(kept, run.tokens), place = before + std::ssize(rows);
    ends.push_back(first + run.tokens);
    slots_of_runs.push_back(run.slot);
    for (std::int64_t t = 0; t < run.tokens; ++t) {
      slots_of.push_back(run.slot);
      positions_of.push_back(run.begin + t);
    }
    for (std::int64_t t = 0; t < some; ++t) rows.push_back(first + t);
    for (std::int64_t t = run.tokens - some; t < run.tokens; ++t) rows.push_back(first + t);
    for (std::int64_t t = run.tokens - kept; t < run.tokens; ++t) {
      last.push_back(t < 0 ? n * kept + kept + t : place + 2 * some - run.tokens + t);
    }
    if (run.begin == 0) continue;
    for (std::int64_t t = 0; t < kept; ++t) edges.push_back(n * kept + t);
    window_outputs.push_back({std::ssize(edges), first, some});
    for (std::int64_t t = 0; t < some; ++t) edges.push_back(place + t);
    edge_ends.push_back(std::ssize(edges));
  }
  const auto tensor = [&](const Numbers& numbers) { return torch::tensor(numbers, torch::kLong).to(device); };
  cu_seqlens = tensor(ends);
  slots = tensor(slots_of);
  positions = tensor(positions_of);
  run_slots = tensor(slots_of_runs);
  edge_rows = tensor(rows);
  last_edges = tensor(last);
  if (!edges.empty()) {
    window_edges = tensor(edges);
    window_ends = tensor(edge_ends);
  }
  if (config.rotary == 0) return;
  const std::int64_t half = config.rotary / 2;
  const auto exponents = torch::arange(half, positions.options().dtype(torch::kDouble)) *
                         (-std::log(config.rope_theta) / static_cast<double>(half));
  const auto angles = positions.to(torch::kDouble).view({-1, 1, 1}) * exponents.exp();
  cos = angles.cos().to(torch::kFloat);
  sin = angles.sin().to(torch::kFloat);
}

// Convolves the inputs of a mixer [T, ·], and keeps the last ones of each run for the next.
Tensor GpuFamilyModel::convolve(const Layer& layer, const Tensor& projected, const Prompts& prompts) const {
  const std::int64_t channels = plan_.channels(), kept = plan_.config.conv - 1;
  const Tensor y = short_conv_of(projected, layer.mixer.taps, prompts.cu_seqlens);
  const Tensor before = layer.conv.index_select(0, prompts.run_slots).view({-1, channels});
  const Tensor inputs = projected.narrow(1, 0, channels).index_select(0, prompts.edge_rows).to(torch::kFloat);
  const Tensor edges = torch::cat({before, inputs});
  if (prompts.window_edges.defined()) {
    const Tensor windows = edges.index_select(0, prompts.window_edges).to(type_);
    const Tensor first = short_conv_of(windows, layer.mixer.taps, prompts.window_ends);
    libtorch::TensorCopies outputs;
    for (const auto& [row, token, tokens] : prompts.window_outputs) {
      outputs.add(first.narrow(0, row, tokens), y.narrow(0, token, tokens));
    }
    outputs.make();
  }
  const Tensor last = edges.index_select(0, prompts.last_edges).view({-1, kept, channels});
  libtorch::TensorCopies copies;
  for (std::int64_t n = 0; n < std::ssize(prompts.runs); ++n) {
    copies.add(last[n], layer.conv[prompts.runs[static_cast<std::size_t>(n)].slot]);
  }
  copies.make();
  return y;
}

// Returns the outputs of a delta layer's mixer for its inputs h [T, D].
Tensor GpuFamilyModel::mix(const Layer& layer, const Tensor& h, const Prompts& prompts) const {
  const auto& config = plan_.config;
  const std::int64_t keys = plan_.keys(), value_heads = config.value_heads, tokens = h.size(0);
  const Tensor weight = layer.mixer.in;
  const Tensor projected = torch::mm(h, weight.narrow(0, 0, plan_.g.first).t());
  const Tensor gate = torch::mm(h, weight.narrow(0, plan_.g.first, plan_.g.count).t());
  const Tensor qkv = convolve(layer, projected, prompts);
  const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t dim) {
    return qkv.narrow(1, first, count * dim).view({1, tokens, count, dim});
  };
  const auto columns = [&](const Columns& own) { return projected.narrow(1, own.first, own.count); };
  const Tensor beta = torch::sigmoid(columns(plan_.b).to(torch::kFloat)) * config.beta_scale;
  const Tensor g = autograd::decay_gate(columns(plan_.a), layer.dt_bias, layer.a_log, decay_activation_of(plan_.gate));
  const auto out = autograd::delta_rule(
      {heads(0, config.heads, config.key_dim), heads(keys, config.heads, config.key_dim),
       heads(2 * keys, value_heads, config.value_dim), beta.to(type_).unsqueeze(0),
       layer.memory.index_select(0, prompts.run_slots), g.to(torch::kFloat).unsqueeze(0), prompts.cu_seqlens},
      plan_.rule);
  libtorch::TensorCopies copies;
  for (std::int64_t n = 0; n < std::ssize(prompts.runs); ++n) {
    copies.add(out.final_state[n], layer.memory[prompts.runs[static_cast<std::size_t>(n)].slot]);
  }
  copies.make();
  const Tensor o = autograd::gated_rms_norm(out.o, gate.view(out.o.sizes()), layer.mixer.o_norm, GateActivation::silu,
                                            config.norm_eps);
  return torch::mm(o.view({tokens, plan_.values()}), layer.out.t());
}

// Rotates heads [T, ·, K] in place.
Tensor GpuFamilyModel::rotate(const Tensor& heads, const Prompts& prompts) const {
  if (!prompts.cos.defined()) return heads;
  const std::int64_t half = config_.rotary / 2;
  const Tensor a = heads.narrow(2, 0, half).to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
  const Tensor b = heads.narrow(2, half, half).to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
  heads.narrow(2, 0, half).copy_(torch::addcmul(a * prompts.cos, b, prompts.sin, -1));
  heads.narrow(2, half, half).copy_(torch::addcmul(b * prompts.cos, a, prompts.sin));
  return heads;
}

// Copies keys and values [N, G, K] of a layer to the pages of their texts, or from them.
void GpuFamilyModel::copy_tokens(const Layer& layer, bool to_pages, const Tensor& slots, const Tensor& positions,
                                 const Tensor& keys, const Tensor& values) const {
  with_dtype(pages_.type(), [&]<class S>(S) {
    PageCopy<S> p;
    p.shape = pages_.shape();
    p.to_pages = to_pages;
    p.slots = view_of<const std::int64_t, 1>(slots);
    p.positions = view_of<const std::int64_t, 1>(positions);
    p.table = pages_.table<S>(layer.index);
    p.keys = view_of<S, 3>(keys);
    p.values = view_of<S, 3>(values);
    copy_pages(p, options_of(keys));
  });
}

// Returns the outputs of an attention layer for its inputs h [T, D].
Tensor GpuFamilyModel::attend(const Layer& layer, const Tensor& h, const Prompts& prompts) const {
  const std::int64_t tokens = h.size(0), heads = config_.heads, groups = config_.key_value_heads;
  const std::int64_t dim = config_.head_dim;
  const bool gated = config_.family->gated_attention;
  const Tensor projected = torch::mm(h, layer.in.t());
  const Tensor queries = projected.narrow(1, 0, projected.size(1) - 2 * groups * dim)
                             .view({tokens, heads, gated ? 2 : 1, dim});  // queries and gates
  const auto normed = [&](const Tensor& all, const Tensor& weight) {      // per head, or of all heads
    return autograd::rms_norm(all.reshape({-1, weight.size(0)}), weight, config_.norm_eps).view({tokens, -1, dim});
  };
  const Tensor q = rotate(normed(queries.select(2, 0), layer.q_norm), prompts);
  const Tensor both = projected.narrow(1, projected.size(1) - 2 * groups * dim, 2 * groups * dim);
  const Tensor k = rotate(normed(both.narrow(1, 0, groups * dim), layer.k_norm), prompts);
  const Tensor v = both.narrow(1, groups * dim, groups * dim).view({tokens, groups, dim});
  copy_tokens(layer, true, prompts.slots, prompts.positions, k.to(pages_.type()), v.to(pages_.type()));

  const auto by_head = [](const Tensor& all) { return all.transpose(0, 1).unsqueeze(0); };  // [1, heads, T, K]
  const Tensor o = torch::empty({tokens, heads, dim}, q.options());
  std::int64_t first = 0;
  for (const auto& run : prompts.runs) {
    const auto own = [&](const Tensor& all) { return all.narrow(0, first, run.tokens); };
    Tensor keys = own(k), values = own(v);
    if (run.begin > 0) {
      const std::int64_t end = run.begin + run.tokens;
      keys = torch::empty({end, groups, dim}, q.options().dtype(pages_.type()));
      values = torch::empty_like(keys);
      copy_tokens(layer, false, torch::full({end}, run.slot, prompts.slots.options()),
                  torch::arange(end, prompts.slots.options()), keys, values);
      keys = keys.to(type_);
      values = values.to(type_);
    }
    own(o).copy_(causal_attention(by_head(own(q)), by_head(keys), by_head(values))[0].transpose(0, 1));
    first += run.tokens;
  }
  const Tensor out = gated ? o * torch::sigmoid(queries.select(2, 1)) : o;
  return torch::mm(out.view({tokens, heads * dim}), layer.out.t());
}

Tensor GpuFamilyModel::apply_mlp(const Layer& layer, const Tensor& h) const {
  const std::int64_t inner = config_.intermediate_size;
  const Tensor both = torch::mm(h, layer.gate_up.t());
  const Tensor product = torch::empty({h.size(0), inner}, h.options());
  with_dtype(type_, [&]<class T>(T) {
    GluForward<T> p;
    p.gate = view_of<const T, 2>(both.narrow(1, 0, inner));
    p.up = view_of<const T, 2>(both.narrow(1, inner, inner));
    p.y = view_of<T, 2>(product);
    glu_forward(p, options_of(product));
  });
  return torch::mm(product, layer.down.t());
}

Tensor GpuFamilyModel::read(const Tensor& ids, std::span<const TextRun> runs) {
  const torch::NoGradGuard no_grad;
  const auto precision = type_ == torch::kBFloat16 ? std::make_unique<libtorch::Bfloat16OnGpu>() : nullptr;
  for (const auto& run : runs) pages_.grow(run.slot, run.begin + run.tokens);
  pages_.addresses();
  const Prompts prompts(runs, config_, device_);
  const double eps = config_.norm_eps;
  const auto branch = [&](const Tensor& output, const Tensor& norm) {
    return norm.defined() ? autograd::rms_norm(output, norm, eps) : output;
  };
  Residual residual{torch::embedding(embeddings_, ids).to(torch::kFloat)};
  for (const auto& layer : layers_) {
    const Tensor h = residual.next(layer.before_mixer, eps, type_);
    residual.branch = branch(layer.attends ? attend(layer, h, prompts) : mix(layer, h, prompts), layer.after_mixer);
    residual.branch = branch(apply_mlp(layer, residual.next(layer.before_mlp, eps, type_)), layer.after_mlp);
  }
  residual.settle();
  return autograd::rms_norm(residual.x, norm_, eps);
}

}  // namespace efla::nn
