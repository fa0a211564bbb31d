#include "efla/nn/families/gpu_family_model.h"

#include <algorithm>
#include <array>
#include <utility>

#include "efla/autograd/delta_rule.h"
#include "efla/autograd/layers/decay_gate.h"
#include "efla/autograd/layers/linear.h"
#include "efla/autograd/layers/rms_norm.h"
#include "efla/autograd/tensor_view.h"
#include "efla/base/error.h"
#include "efla/nn/families/gguf_config.h"
#include "efla/nn/families/gpu_family_layer.h"
#include "efla/ops/attention_step.h"
#include "efla/torch/context.h"
#include "efla/torch/tensor_copies.h"

namespace efla::nn {

using autograd::fused_linear;
using autograd::view_of;
using torch::Tensor;

namespace {

AttentionShape attention_shape(const FamilyConfig& config) {
  return {.heads = config.heads,
          .key_value_heads = config.key_value_heads,
          .key_dim = config.head_dim,
          .value_dim = config.head_dim};
}

// Returns the configuration of a model that a GPU computes. Throws Error for another one.
FamilyConfig gpu_config(const std::filesystem::path& folder) {
  constexpr std::int64_t kMostHeadDim = 256;  // of the kernel attention_step
  if (is_gguf(folder)) throw Error("model", "device", "a GPU", "the CPU, for a GGUF file");
  FamilyConfig config = load_family_config(folder);
  if (config.experts.count > 0)
    throw Error("model", "device", "a GPU", "the CPU, for a model with num_experts above 0");
  if (config.attention_layers() > 0 && config.head_dim > kMostHeadDim) {
    throw Error(
        "model", "device", "a GPU",
        "the CPU, because head_dim is " + std::to_string(config.head_dim) + ", above " + std::to_string(kMostHeadDim));
  }
  return config;
}

// Returns a matrix in the process's memory as a tensor that shares the memory.
Tensor tensor_of(const StoredMatrix& matrix) {
  const auto share = [](const auto& view, torch::ScalarType type) {
    auto* const data = const_cast<void*>(static_cast<const void*>(view.data));
    return torch::from_blob(data, {view.extent[0], view.extent[1]}, type);
  };
  return matrix.narrow ? share(matrix.narrow, torch::kBFloat16) : share(matrix.wide, torch::kFloat);
}

// The type in which weights are on a GPU.
torch::ScalarType weight_type(WeightType weights, const StoredMatrix& embeddings) {
  if (is_integer(weights)) {
    throw Error("model", "weights", std::string(name_of(weights)) + " on a GPU", "float32 or bfloat16");
  }
  return weights == WeightType::bfloat16 || embeddings.narrow ? torch::kBFloat16 : torch::kFloat;
}

// The type of keys and values in slots.
torch::ScalarType page_type(std::optional<KeyValueType> kv_cache_type, torch::ScalarType weights) {
  if (!kv_cache_type) return weights;
  return *kv_cache_type == KeyValueType::float32 ? torch::kFloat : torch::kBFloat16;
}

}  // namespace

GpuFamilyModel::GpuFamilyModel(const std::filesystem::path& folder, WeightType weights, std::int64_t drawable,
                               torch::Device device, std::optional<KeyValueType> kv_cache_type)
    : config_(gpu_config(folder)),
      plan_(config_.mixer),
      tensors_(folder, config_),
      device_(device),
      type_(weight_type(weights, tensors_.embeddings())),
      drawable_(std::min(drawable, config_.vocab_size)),
      pages_(attention_shape(config_), config_.attention_layers(), page_type(kv_cache_type, type_),
             kv_cache_type.value_or(KeyValueType::float32), device) {
  config_.tied = tensors_.tied();
  const StoredMatrix embeddings = tensors_.embeddings();
  embeddings_ = packed(std::span(&embeddings, 1));
  norm_ = on_device(tensors_.norm());
  if (config_.tied) {
    head_ = embeddings_;
  } else {
    const StoredMatrix head = tensors_.head();
    head_ = packed(std::span(&head, 1));
  }
  for (std::int64_t i = 0; i < config_.layers(); ++i) {
    layers_.push_back(packed_layer(tensors_.layer(i, plan_)));
    layers_.back().index = std::ranges::count(layers_, true, &Layer::attends) - 1;
  }
  tensors_.check_all_read();
  parameters_ = tensors_.elements_read();
}

GpuFamilyModel::~GpuFamilyModel() = default;

// Returns a tensor of these numbers; an undefined one if there are none.
Tensor GpuFamilyModel::on_device(const Vector& values) const {
  return values.empty() ? Tensor() : torch::tensor(at::ArrayRef<float>(values)).to(device_);
}

// Returns the rows of all parts as one matrix.
Tensor GpuFamilyModel::packed(std::span<const StoredMatrix> parts) const {
  std::vector<Tensor> matrices;
  std::int64_t rows = 0;
  for (const auto& part : parts) {
    matrices.push_back(tensor_of(part));
    rows += matrices.back().size(0);
  }
  const Tensor all = torch::empty({rows, matrices.front().size(1)}, torch::TensorOptions(type_).device(device_));
  rows = 0;
  for (const auto& matrix : matrices) {
    all.narrow(0, rows, matrix.size(0)).copy_(matrix);
    rows += matrix.size(0);
  }
  return all;
}

GpuFamilyModel::Layer GpuFamilyModel::packed_layer(const LayerTensors& from) const {
  Layer layer;
  layer.attends = from.attends;
  layer.before_mixer = on_device(from.before_mixer);
  layer.after_mixer = on_device(from.after_mixer);
  layer.before_mlp = on_device(from.before_mlp);
  layer.after_mlp = on_device(from.after_mlp);
  layer.gate_up = packed(from.mlp.gate_up);
  layer.down = packed(std::span(&from.mlp.down, 1));
  layer.out = packed(std::span(from.attends ? &from.attention.out : &from.mixer.out, 1));
  if (from.attends) {
    layer.in = packed(from.attention.in);
    layer.q_norm = on_device(from.attention.q_norm);
    layer.k_norm = on_device(from.attention.k_norm);
    return layer;
  }
  const MixerTensors& mixer = from.mixer;
  layer.a_log = on_device(mixer.a_log);
  layer.dt_bias = on_device(mixer.dt_bias);
  const auto decay = autograd::decay_rate(layer.dt_bias, layer.a_log, decay_activation_of(plan_.gate));
  layer.mixer.in = packed(mixer.in);
  layer.mixer.o_norm = on_device(mixer.o_norm);
  layer.mixer.taps = on_device(mixer.taps).view({plan_.channels(), plan_.config.conv});
  layer.mixer.beta_factor = torch::full({plan_.config.value_heads}, plan_.config.beta_scale, layer.a_log.options());
  layer.mixer.rate = decay.rate;
  layer.mixer.dt_bias = decay.bias;
  return layer;
}

std::size_t GpuFamilyModel::constant_bytes() const {
  const auto parts = state_parts();
  return parts.empty() ? 0 : (parts.back().offset + parts.back().floats) * sizeof(float);
}

void GpuFamilyModel::make_slots(std::int64_t slots) {
  const auto& config = plan_.config;
  const torch::TensorOptions options(device_);
  for (auto& layer : layers_) {
    if (layer.attends) continue;
    layer.memory = torch::zeros({slots + 1, config.value_heads, config.key_dim, config.value_dim}, options);
    layer.conv = torch::zeros({slots + 1, config.conv - 1, plan_.channels()}, options);
    layer.has_kernel = takes_step(plan_, layer.mixer, {layer.memory.narrow(0, 0, 1), layer.conv.narrow(0, 0, 1)});
  }
  pages_.make_slots(slots);
  arrivals_ = torch::zeros({slots * config_.key_value_heads}, options.dtype(torch::kInt));
  load_kernels();
}

// Computes a prompt and a decoded token, because a GPU loads each kernel at its first launch, which takes long.
void GpuFamilyModel::load_kernels() {
  const TextRun run{.tokens = kCutTokens};
  const Tensor ids = torch::zeros({kCutTokens}, torch::TensorOptions(torch::kLong).device(device_));
  logits(read(ids, std::span(&run, 1)).narrow(0, 0, 1));
  const Entry entry{0, kCutTokens};
  step(ids.narrow(0, 0, 1), std::span(&entry, 1));
  clear(0);
}

void GpuFamilyModel::clear(std::int64_t slot) {
  std::vector<Tensor> states;
  for (const auto& layer : layers_) {
    if (!layer.attends) states.insert(states.end(), {layer.memory[slot], layer.conv[slot]});
  }
  if (!states.empty()) at::_foreach_zero_(states);
  pages_.clear(slot);
}

void GpuFamilyModel::set(std::int64_t slot, const TextState& state) {
  const Tensor numbers = torch::tensor(at::ArrayRef<float>(*state.constant)).to(device_);
  libtorch::TensorCopies copies;
  std::int64_t at = 0;
  for (const auto& layer : layers_) {
    if (layer.attends) continue;
    for (const auto& to : {layer.memory[slot], layer.conv[slot]}) {
      copies.add(numbers.narrow(0, at, to.numel()).view(to.sizes()), to);
      at += to.numel();
    }
  }
  copies.make();
  pages_.set(slot, state.tokens, state.pages);
}

void GpuFamilyModel::copy(std::int64_t from, std::int64_t to, std::int64_t tokens) {
  libtorch::TensorCopies copies;
  for (const auto& layer : layers_) {
    if (layer.attends) continue;
    copies.add(layer.memory[from], layer.memory[to]);
    copies.add(layer.conv[from], layer.conv[to]);
  }
  copies.make();
  pages_.copy(from, to, tokens);
}

TextState GpuFamilyModel::state(std::int64_t slot, std::int64_t tokens) {
  std::vector<Tensor> parts;
  for (const auto& layer : layers_) {
    if (!layer.attends) parts.insert(parts.end(), {layer.memory[slot].flatten(), layer.conv[slot].flatten()});
  }
  const Tensor all = parts.empty() ? torch::empty({0}) : torch::cat(parts).to(torch::kCPU);
  const float* const numbers = all.data_ptr<float>();
  return {tokens, std::make_shared<std::vector<float>>(numbers, numbers + all.numel()), pages_.pages(slot, tokens)};
}

// Returns the tensors that a graph of a step reads and writes.
std::vector<Tensor> GpuFamilyModel::held() const {
  std::vector<Tensor> all{arrivals_};
  for (const auto& layer : layers_) {
    if (!layer.attends) all.insert(all.end(), {layer.memory, layer.conv});
  }
  return all;
}

StepOutput GpuFamilyModel::step(const Tensor& ids, std::span<const Entry> entries) {
  const torch::NoGradGuard no_grad;
  const std::int64_t count = std::ssize(entries);
  const Tensor numbers = torch::empty({2, count}, torch::kLong);  // slots, positions
  auto written = numbers.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < count; ++i) {
    const Entry& entry = entries[static_cast<std::size_t>(i)];
    if (entry.slot >= 0) pages_.grow(entry.slot, entry.begin + 1);
    written[0][i] = entry.slot;
    written[1][i] = entry.begin;
  }
  auto tensors = held();
  tensors.push_back(pages_.addresses());
  const auto outputs = graph_.call(
      [&](const std::vector<Tensor>& inputs) -> std::vector<Tensor> {
        const auto output = step_output(decode(inputs[0], inputs[1]), drawable_);
        return {output.logits, output.likeliest};
      },
      {ids, numbers.to(device_, /*non_blocking=*/true)}, tensors);
  return {outputs[0], outputs[1]};
}

// Returns the logits of a step. entries [2, B]: slots and positions.
Tensor GpuFamilyModel::decode(const Tensor& ids, const Tensor& entries) const {
  const double eps = config_.norm_eps;
  Tensor x = torch::embedding(embeddings_, ids).to(torch::kFloat);
  const auto add = [&](const Tensor& from, const Tensor& weight, const Tensor& norm) {
    if (!norm.defined()) return fused_linear(from, weight, {.residual = x});
    return x + autograd::rms_norm(fused_linear(from, weight), norm, eps);
  };
  for (const auto& layer : layers_) {
    Tensor o;
    if (layer.attends) {
      o = attend_step(layer, fused_linear(x, layer.in, {.norm_weight = layer.before_mixer, .norm_eps = eps}), entries);
    } else {
      o = mix_step(layer, x, entries[0]);
    }
    x = add(o, layer.out, layer.after_mixer);
    const Tensor inner =
        fused_linear(x, layer.gate_up, {.norm_weight = layer.before_mlp, .norm_eps = eps, .swiglu = true});
    x = add(inner, layer.down, layer.after_mlp);
  }
  return fused_linear(x, head_, {.norm_weight = norm_, .norm_eps = eps});
}

// Returns the outputs [B, HV·V] of a mixer before the projection of the output.
Tensor GpuFamilyModel::mix_step(const Layer& layer, const Tensor& x, const Tensor& slots) const {
  const Projected projected = project(plan_, layer.mixer, x, {layer.before_mixer, config_.norm_eps});
  if (layer.has_kernel) return step_mixer(plan_, layer.mixer, projected, {layer.memory, layer.conv, slots});
  return composed_step(layer, projected, slots);
}

// Computes the same by LibTorch's operators and the delta rule's decode step, for heads that the kernel does not take.
Tensor GpuFamilyModel::composed_step(const Layer& layer, const Projected& projected, const Tensor& slots) const {
  const auto& config = plan_.config;
  const std::int64_t batch = projected.all.size(0), keys = plan_.keys();
  const auto columns = [&](const Columns& own) { return projected.all.narrow(1, own.first, own.count); };
  const Tensor rows = torch::remainder(slots, layer.conv.size(0));  // the last one for entries without a text
  const Tensor inputs = columns({0, plan_.channels()}).unsqueeze(1);
  const Tensor window = torch::cat({layer.conv.index_select(0, rows), inputs}, 1);  // [B, W, C]
  Tensor conv = layer.conv, memory = layer.memory;
  conv.index_copy_(0, rows, window.narrow(1, 1, config.conv - 1));
  const Tensor u = torch::silu((window * layer.mixer.taps.t()).sum(1)).unsqueeze(1);
  const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t dim) {
    return u.narrow(2, first, count * dim).unflatten(2, {count, dim});
  };
  const Tensor beta = torch::sigmoid(columns(plan_.b)) * layer.mixer.beta_factor;
  const Tensor g = -layer.mixer.rate * torch::softplus(columns(plan_.a) + layer.mixer.dt_bias);
  const Tensor o =
      autograd::delta_rule_steps(heads(0, config.heads, config.key_dim), heads(keys, config.heads, config.key_dim),
                                 heads(2 * keys, config.value_heads, config.value_dim), beta.unsqueeze(1),
                                 g.unsqueeze(1), memory, slots, {}, plan_.rule);
  const Tensor gate = columns(plan_.g).unflatten(1, {config.value_heads, config.value_dim}).unsqueeze(1);
  return autograd::gated_rms_norm(o, gate, layer.mixer.o_norm, GateActivation::silu, config.norm_eps)
      .view({batch, plan_.values()});
}

// Returns the outputs [B, H·K] of an attention before the projection of the output.
Tensor GpuFamilyModel::attend_step(const Layer& layer, const Tensor& qkv, const Tensor& entries) const {
  const std::int64_t batch = qkv.size(0);
  const Tensor o = torch::empty({batch, config_.heads * config_.head_dim}, qkv.options());
  autograd::with_dtype(pages_.type(), [&]<class S>(S) {
    efla::AttentionStep<S> p;
    p.shape = pages_.shape();
    p.qkv = view_of<const float, 2>(qkv);
    p.gated = config_.family->gated_attention;
    p.q_norm = view_of<const float, 1>(layer.q_norm);
    p.k_norm = view_of<const float, 1>(layer.k_norm);
    p.norm_eps = static_cast<float>(config_.norm_eps);
    p.rotary = config_.rotary;
    p.theta = config_.rope_theta;
    p.slots = view_of<const std::int64_t, 1>(entries[0]);
    p.positions = view_of<const std::int64_t, 1>(entries[1]);
    p.table = pages_.table<S>(layer.index);
    p.arrivals = view_of<std::int32_t, 1>(arrivals_.narrow(0, 0, batch * config_.key_value_heads));
    p.o = view_of<float, 2>(o);
    attention_step(p, {device_.is_cpu() ? "ref" : "auto", libtorch::context_of(o)});
  });
  return o;
}

Tensor GpuFamilyModel::logits(const Tensor& hidden) const {
  const torch::NoGradGuard no_grad;
  return fused_linear(hidden, head_);
}

}  // namespace efla::nn
