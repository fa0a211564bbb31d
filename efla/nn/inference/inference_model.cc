#include "efla/nn/inference/inference_model.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "efla/base/error.h"
#include "efla/nn/named_tensor.h"
#include "efla/ops/delta.h"
#include "efla/ops/layers/glu.h"
#include "efla/ops/layers/rms_norm.h"
#include "efla/ops/layers/short_conv.h"

namespace efla::nn {
namespace {

using Vector = std::vector<float>;

Vector values_of(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous().flatten();
  return Vector(flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel());
}

View<float, 2> columns_of(View<float, 2> view, std::int64_t begin, std::int64_t count) {
  view.data += begin;
  view.extent[1] = count;
  return view;
}

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

// As LibTorch, which returns large x unchanged.
float softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

void add(const View<float, 2>& to, const View<float, 2>& x) {
  for (std::int64_t i = 0; i < to.size(); ++i) to.data[i] += x.data[i];
}

// Calls f(row) for every row, several per task.
template <class F>
void for_each_row(std::int64_t rows, ThreadPool& pool, F&& f) {
  constexpr std::int64_t kRows = 16;
  pool.run((rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    for (std::int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) f(row);
  });
}

void norm(const View<float, 2>& x, const Vector& weight, double eps, const View<float, 2>& y, ThreadPool& pool) {
  RmsNormForward<float> p;
  p.x = x;
  p.weight = View<const float, 1>::contiguous(weight.data(), {static_cast<std::int64_t>(weight.size())});
  p.eps = static_cast<float>(eps);
  p.y = y;
  rms_norm_forward(p, {.context = {.pool = &pool}});
}

}  // namespace

StatePool::StatePool(std::int64_t slots, std::size_t slot_floats)
    : slots_(slots),
      slot_floats_(slot_floats),
      data_(std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(slots) * slot_floats)) {}

struct InferenceModel::Layer {
  Vector attn_norm, mlp_norm, o_norm, taps;
  Vector beta_factor;    // [HV]: beta_scale · softplus(α)
  Vector rate, dt_bias;  // of the decay: exp(A_log) [HV]; [HV] or [HV·K]
  Vector gate_bias;      // of the sigmoid gate [HV·V]
  PackedWeight in;       // q, k, v and, where they exist, b, a, the decay's low rank f and the gate g
  PackedWeight f_out, g_out, o_proj, gate_up, down;
  std::int64_t b = -1, a = -1, f = -1, g = -1;  // their first columns in the outputs of `in`; −1: none
};

// What the layers of one call compute, row by row.
struct InferenceModel::Buffers {
  // A vector that only grows. Its elements are undefined.
  class Buffer {
   public:
    View<float, 2> rows(std::int64_t count, std::int64_t columns) {
      const auto size = static_cast<std::size_t>(count * columns);
      if (size > size_) data_ = std::make_unique_for_overwrite<float[]>(size_ = size);
      return View<float, 2>::contiguous(data_.get(), {count, columns});
    }
    float* data() const { return data_.get(); }

   private:
    std::size_t size_ = 0;
    std::unique_ptr<float[]> data_;
  };

  std::int64_t rows = 0, decodes = 0;
  Buffer x, normed, projected, window, mixed, beta, decay, o, gate, inner, product, final_state;
};

std::string InferenceModel::refusal(const LanguageModelConfig& config) {
  if (mixer_preset(config.mixer).softmax || !config.attention_layers.empty()) return "layers of softmax attention";
  const auto mixer = config.mixer_config();
  if (mixer.conv == 0) return "a mixer without short convolution";
  if (mixer.qk_activation != "silu") return "the activation " + mixer.qk_activation;
  return mixer.qk_sum_norm ? "qk_norm sum" : "";
}

InferenceModel::InferenceModel(const LanguageModel& model, WeightType weights)
    : config_(model.config()),
      mixer_(config_.mixer_config()),
      preset_(mixer_preset(config_.mixer)),
      gate_(mixer_.lower_bound ? Gate::safe_channel : preset_.gate),
      buffers_(std::make_unique<Buffers>()) {
  if (const auto reason = refusal(config_); !reason.empty()) {
    throw Error("inference", "model", reason, "a state of constant size, and short convolutions with silu");
  }
  if (mixer_.value_heads == 0) mixer_.value_heads = mixer_.heads;
  rule_.step = parse_step_size(std::string(preset_.step));
  rule_.step.erase_scale = preset_.erase_scale;
  rule_.step.write_scale = preset_.write_scale;
  rule_.qk_l2norm = preset_.qk_l2norm;
  rule_.decay = gate_ == Gate::none ? Decay::none : gate_ == Gate::scalar ? Decay::scalar : Decay::channel;
  values_ = mixer_.value_heads * mixer_.value_dim;
  channels_ = 2 * mixer_.heads * mixer_.key_dim + values_;
  memory_floats_ = values_ * mixer_.key_dim;
  layer_floats_ = memory_floats_ + (mixer_.conv - 1) * channels_;
  state_floats_ = static_cast<std::size_t>(config_.num_hidden_layers * layer_floats_);

  const auto named = model.named_parameters();
  norm_ = values_of(named["model.norm.weight"]);
  if (!config_.tie_word_embeddings) embeddings_ = named["model.embeddings.weight"].detach().contiguous();
  head_ = PackedWeight({model.head()}, weights);
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) layers_.push_back(packed_layer(model, i, weights));
}

InferenceModel::~InferenceModel() = default;

InferenceModel::Layer InferenceModel::packed_layer(const LanguageModel& model, std::int64_t index,
                                                   WeightType weights) const {
  const auto named = model.named_parameters();
  const std::string prefix = "model.layers." + std::to_string(index) + ".";
  const auto get = [&](const std::string& name) { return named[prefix + name]; };
  const auto has = [&](const std::string& name) { return named.contains(prefix + name); };
  Layer layer;
  layer.attn_norm = values_of(get("attn_norm.weight"));
  layer.mlp_norm = values_of(get("mlp_norm.weight"));
  if (mixer_.output_norm) layer.o_norm = values_of(get("attn.o_norm.weight"));
  layer.taps =
      values_of(torch::cat({get("attn.q_conv1d.weight"), get("attn.k_conv1d.weight"), get("attn.v_conv1d.weight")}));

  std::vector<torch::Tensor> parts{get("attn.q_proj.weight"), get("attn.k_proj.weight"), get("attn.v_proj.weight")};
  std::int64_t columns = channels_;
  const auto append = [&](const std::string& name, std::int64_t& first) {
    if (!has(name)) return;
    first = columns;
    parts.push_back(get(name));
    columns += parts.back().size(0);
  };
  append("attn.b_proj.weight", layer.b);
  append("attn.a_proj.weight", layer.a);
  append("attn.f_proj.0.weight", layer.f);
  append(mixer_.output_gate == OutputGate::silu ? "attn.g_proj.weight" : "attn.g_proj.0.weight", layer.g);
  layer.in = PackedWeight(parts, weights);
  if (layer.f >= 0) layer.f_out = PackedWeight({get("attn.f_proj.1.weight")}, weights);
  if (mixer_.output_gate == OutputGate::sigmoid) {
    layer.g_out = PackedWeight({get("attn.g_proj.1.weight")}, weights);
    layer.gate_bias = values_of(get("attn.g_proj.1.bias"));
  }
  layer.o_proj = PackedWeight({get("attn.o_proj.weight")}, weights);
  layer.gate_up = PackedWeight({get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")}, weights);
  layer.down = PackedWeight({get("mlp.down_proj.weight")}, weights);

  layer.beta_factor.assign(static_cast<std::size_t>(mixer_.value_heads), static_cast<float>(mixer_.beta_scale));
  if (has("attn.alpha")) {
    const auto alpha = values_of(get("attn.alpha"));
    for (std::size_t i = 0; i < alpha.size(); ++i) layer.beta_factor[i] *= softplus(alpha[i]);
  }
  if (gate_ != Gate::none) {
    layer.rate = values_of(torch::exp(get("attn.A_log")));
    layer.dt_bias = values_of(get("attn.dt_bias"));
  }
  return layer;
}

std::size_t InferenceModel::weight_bytes() const {
  std::size_t total = head_.bytes() + (embeddings_.defined() ? embeddings_.nbytes() : 0);
  for (const auto& layer : layers_) {
    for (const auto* weight : {&layer.in, &layer.f_out, &layer.g_out, &layer.o_proj, &layer.gate_up, &layer.down}) {
      total += weight->bytes();
    }
  }
  return total;
}

std::vector<StatePart> InferenceModel::state_parts() const {
  std::vector<StatePart> parts;
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const auto first = static_cast<std::size_t>(i * layer_floats_), memory = static_cast<std::size_t>(memory_floats_);
    const std::string prefix = "layers." + std::to_string(i) + ".";
    parts.push_back({prefix + "memory", {1, mixer_.value_heads, mixer_.key_dim, mixer_.value_dim}, first, memory});
    parts.push_back({prefix + "conv",
                     {1, mixer_.conv - 1, channels_},
                     first + memory,
                     static_cast<std::size_t>(layer_floats_ - memory_floats_)});
  }
  return parts;
}

void InferenceModel::copy_state(const LanguageModelState& from, std::span<float> slot) const {
  const auto parts = state_parts();
  const auto tensors = from.tensors();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::copy_n(tensors[i].second.data_ptr<float>(), parts[i].floats, slot.begin() + parts[i].offset);
  }
}

void InferenceModel::copy_state(std::span<const float> slot, LanguageModelState& to) const {
  const auto parts = state_parts();
  const auto tensor_of = [&](const StatePart& part) {
    const auto tensor = torch::empty(part.shape);
    std::copy_n(slot.begin() + part.offset, part.floats, tensor.data_ptr<float>());
    return tensor;
  };
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    auto& mixer = std::get<MixerState>(to.layers[i]);
    mixer.memory = tensor_of(parts[2 * i]);
    mixer.conv = tensor_of(parts[2 * i + 1]);
  }
}

// Computes beta [R, HV] and, with a gate, decay [R, HV] or [R, HV·K] from the projections.
void InferenceModel::compute_gates(const Layer& layer, ThreadPool& pool) {
  auto& own = *buffers_;
  const std::int64_t heads = mixer_.value_heads, dim = mixer_.key_dim;
  const View<float, 2> projected = own.projected.rows(own.rows, layer.in.outputs());
  const View<float, 2> beta = own.beta.rows(own.rows, heads);
  const bool by_channel = gate_ == Gate::channel || gate_ == Gate::safe_channel;
  const View<float, 2> decay = own.decay.rows(own.rows, by_channel ? heads * dim : heads);
  if (layer.f >= 0) layer.f_out.apply(columns_of(projected, layer.f, mixer_.value_dim), decay, pool);
  const float bound = static_cast<float>(mixer_.lower_bound.value_or(kGateLowerBound));
  for_each_row(own.rows, pool, [&](std::int64_t row) {
    for (std::int64_t h = 0; h < heads; ++h) {
      float value = 1.0F;
      if (layer.b >= 0) {
        const float b = projected(row, layer.b + h);
        value = preset_.beta == BetaActivation::sigmoid ? sigmoid(b) : softplus(b);
      }
      beta(row, h) = value * layer.beta_factor[static_cast<std::size_t>(h)];
    }
    if (gate_ == Gate::none) return;
    for (std::int64_t c = 0; c < decay.extent[1]; ++c) {
      const float rate = layer.rate[static_cast<std::size_t>(by_channel ? c / dim : c)];
      const float z =
          (by_channel ? decay(row, c) : projected(row, layer.a + c)) + layer.dt_bias[static_cast<std::size_t>(c)];
      decay(row, c) = gate_ == Gate::safe_channel ? bound * sigmoid(rate * z) : -rate * softplus(z);
    }
  });
}

// Computes the short convolution of every run after its last inputs, which its slot keeps. The outputs of a run lie in
// `mixed` behind W − 1 rows that nobody reads.
void InferenceModel::convolve(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool) {
  auto& own = *buffers_;
  const std::int64_t kept = mixer_.conv - 1, count = static_cast<std::int64_t>(runs.size());
  const View<float, 2> projected = own.projected.rows(own.rows, layer.in.outputs());
  const View<float, 2> window = own.window.rows(own.rows + count * kept, channels_);
  const View<float, 2> mixed = own.mixed.rows(own.rows + count * kept, channels_);
  const auto bytes = [&](std::int64_t rows) { return static_cast<std::size_t>(rows * channels_) * sizeof(float); };
  const auto first_conv = static_cast<std::size_t>((&layer - layers_.data()) * layer_floats_ + memory_floats_);
  std::int64_t row = 0, at = 0;
  for (const auto& run : runs) {
    float* history = states.slot(run.slot).data() + first_conv;
    std::memcpy(window.at(at), history, bytes(kept));
    for (std::int64_t t = 0; t < run.tokens; ++t)
      std::memcpy(window.at(at + kept + t), projected.at(row + t), bytes(1));
    std::memcpy(history, window.at(at + run.tokens), bytes(kept));
    row += run.tokens;
    at += kept + run.tokens;
  }
  const auto part = [&](std::int64_t batch, std::int64_t first, std::int64_t tokens) {
    ShortConvForward<float> p;
    p.x = View<const float, 3>::contiguous(window.at(first), {batch, tokens, channels_});
    p.weight = View<const float, 2>::contiguous(layer.taps.data(), {channels_, mixer_.conv});
    p.y = View<float, 3>::contiguous(mixed.at(first), {batch, tokens, channels_});
    short_conv_forward(p, {.context = {.pool = &pool}});
  };
  if (own.decodes > 0) part(own.decodes, 0, mixer_.conv);
  at = own.decodes * mixer_.conv;
  for (const auto& run : runs.subspan(static_cast<std::size_t>(own.decodes))) {
    part(1, at, kept + run.tokens);
    at += kept + run.tokens;
  }
}

// Computes a run of a prompt, cut where every cut of the prompt cuts it. qkv: its first token's.
void InferenceModel::recur_prompt(const TextRun& run, std::int64_t row, const float* qkv, std::span<float> memory,
                                  ThreadPool& pool) {
  auto& own = *buffers_;
  const std::int64_t keys = mixer_.heads * mixer_.key_dim, heads = mixer_.value_heads;
  const std::array<std::int64_t, 4> state_shape{1, heads, mixer_.key_dim, mixer_.value_dim};
  const std::int64_t g_columns = rule_.decay == Decay::channel ? mixer_.key_dim : 1;
  const auto heads_of = [&](const float* first, std::int64_t tokens, std::int64_t count, std::int64_t dim) {
    return View<const float, 4>{first, {1, tokens, count, dim}, {tokens * channels_, channels_, dim, 1}};
  };
  for (std::int64_t done = 0; done < run.tokens;) {
    const std::int64_t begin = run.begin + done, end = run.begin + run.tokens;
    const std::int64_t whole = end / kCutTokens * kCutTokens, next = (begin / kCutTokens + 1) * kCutTokens;
    const std::int64_t stop = begin % kCutTokens != 0 ? std::min(next, end) : begin < whole ? whole : end;
    const std::int64_t tokens = stop - begin;
    const float* first = qkv + done * channels_;
    DeltaForward<float> p;
    p.shape = {1, tokens, mixer_.heads, heads, mixer_.key_dim, mixer_.value_dim};
    p.rule = rule_;
    p.q = heads_of(first, tokens, mixer_.heads, mixer_.key_dim);
    p.k = heads_of(first + keys, tokens, mixer_.heads, mixer_.key_dim);
    p.v = heads_of(first + 2 * keys, tokens, heads, mixer_.value_dim);
    p.beta = View<const float, 3>::contiguous(own.beta.data() + (row + done) * heads, {1, tokens, heads});
    if (rule_.decay != Decay::none) {
      p.g = View<const float, 4>::contiguous(own.decay.data() + (row + done) * heads * g_columns,
                                             {1, tokens, heads, g_columns});
    }
    p.initial_state = View<const float, 4>::contiguous(memory.data(), state_shape);
    p.o = View<float, 4>::contiguous(own.o.data() + (row + done) * values_, {1, tokens, heads, mixer_.value_dim});
    p.final_state = View<float, 4>::contiguous(own.final_state.rows(1, memory_floats_).data, state_shape);
    delta_forward(p, {.context = {.pool = &pool}});
    std::copy_n(own.final_state.data(), memory_floats_, memory.data());
    done += tokens;
  }
}

void InferenceModel::recur(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool) {
  auto& own = *buffers_;
  const std::int64_t keys = mixer_.heads * mixer_.key_dim, heads = mixer_.value_heads, kept = mixer_.conv - 1;
  const std::int64_t layer_first = (&layer - layers_.data()) * layer_floats_;
  own.o.rows(own.rows, values_);
  if (own.decodes > 0) {
    std::vector<std::int64_t> slots;
    for (const auto& run : runs.first(static_cast<std::size_t>(own.decodes))) slots.push_back(run.slot);
    const std::int64_t n = own.decodes, row = mixer_.conv * channels_;
    const std::int64_t g_columns = rule_.decay == Decay::channel ? mixer_.key_dim : 1;
    const float* qkv = own.mixed.data() + kept * channels_;
    const auto heads_of = [&](const float* first, std::int64_t count, std::int64_t dim) {
      return View<const float, 4>{first, {n, 1, count, dim}, {row, channels_, dim, 1}};
    };
    DeltaSteps<float> p;
    p.shape = {n, 1, mixer_.heads, heads, mixer_.key_dim, mixer_.value_dim};
    p.rule = rule_;
    p.q = heads_of(qkv, mixer_.heads, mixer_.key_dim);
    p.k = heads_of(qkv + keys, mixer_.heads, mixer_.key_dim);
    p.v = heads_of(qkv + 2 * keys, heads, mixer_.value_dim);
    p.beta = View<const float, 3>::contiguous(own.beta.data(), {n, 1, heads});
    if (rule_.decay != Decay::none) p.g = View<const float, 4>::contiguous(own.decay.data(), {n, 1, heads, g_columns});
    p.slots = View<const std::int64_t, 1>::contiguous(slots.data(), {n});
    p.states = View<float, 4>::contiguous(states.slot(0).data() + layer_first,
                                          {states.slots(), heads, mixer_.key_dim, mixer_.value_dim});
    p.states.stride[0] = static_cast<std::int64_t>(state_floats_);
    p.o = View<float, 4>::contiguous(own.o.data(), {n, 1, heads, mixer_.value_dim});
    delta_steps(p, {.context = {.pool = &pool}});
  }
  std::int64_t row = own.decodes, at = own.decodes * mixer_.conv;
  for (const auto& run : runs.subspan(static_cast<std::size_t>(own.decodes))) {
    const auto memory =
        states.slot(run.slot).subspan(static_cast<std::size_t>(layer_first), static_cast<std::size_t>(memory_floats_));
    recur_prompt(run, row, own.mixed.data() + (at + kept) * channels_, memory, pool);
    row += run.tokens;
    at += kept + run.tokens;
  }
}

// Replaces normed by the mixer's output.
void InferenceModel::mix(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool) {
  auto& own = *buffers_;
  const View<float, 2> normed = own.normed.rows(own.rows, config_.hidden_size);
  const View<float, 2> projected = own.projected.rows(own.rows, layer.in.outputs());
  layer.in.apply(normed, projected, pool);
  convolve(layer, runs, states, pool);
  compute_gates(layer, pool);
  recur(layer, runs, states, pool);
  const View<float, 2> o = own.o.rows(own.rows, values_);
  if (mixer_.output_norm) {
    const auto heads = View<float, 2>::contiguous(o.data, {own.rows * mixer_.value_heads, mixer_.value_dim});
    norm(heads, layer.o_norm, mixer_.norm_eps, heads, pool);
  }
  if (mixer_.output_gate == OutputGate::silu) {
    glu_forward<float>({columns_of(projected, layer.g, values_), o, o}, {.context = {.pool = &pool}});
  } else if (mixer_.output_gate == OutputGate::sigmoid) {
    const View<float, 2> gate = own.gate.rows(own.rows, values_);
    layer.g_out.apply(columns_of(projected, layer.g, mixer_.value_dim), gate, pool);
    for (std::int64_t row = 0; row < own.rows; ++row) {
      for (std::int64_t c = 0; c < values_; ++c) gate(row, c) += layer.gate_bias[static_cast<std::size_t>(c)];
    }
    glu_forward<float>({gate, o, o, GateActivation::sigmoid}, {.context = {.pool = &pool}});
  }
  layer.o_proj.apply(o, normed, pool);
}

void InferenceModel::advance(std::span<const std::int32_t> ids, std::span<const TextRun> runs, StatePool& states,
                             const View<float, 2>& hidden, ThreadPool& pool) {
  auto& own = *buffers_;
  own.rows = static_cast<std::int64_t>(ids.size());
  own.decodes = std::count_if(runs.begin(), runs.end(), [](const TextRun& run) { return run.decode; });
  const std::int64_t width = config_.hidden_size, inner = config_.mlp_width();
  const View<float, 2> x = own.x.rows(own.rows, width), normed = own.normed.rows(own.rows, width);
  for (std::int64_t row = 0; row < own.rows; ++row) {
    const std::int64_t id = ids[static_cast<std::size_t>(row)];
    if (embeddings_.defined()) {
      std::copy_n(embeddings_.data_ptr<float>() + id * width, width, x.at(row));
    } else {
      head_.copy_row(id, x.at(row));
    }
  }
  for (const auto& layer : layers_) {
    norm(x, layer.attn_norm, config_.norm_eps, normed, pool);
    mix(layer, runs, states, pool);
    add(x, normed);
    norm(x, layer.mlp_norm, config_.norm_eps, normed, pool);
    const View<float, 2> both = own.inner.rows(own.rows, 2 * inner), product = own.product.rows(own.rows, inner);
    layer.gate_up.apply(normed, both, pool);
    glu_forward<float>({columns_of(both, 0, inner), columns_of(both, inner, inner), product},
                       {.context = {.pool = &pool}});
    layer.down.apply(product, normed, pool);
    add(x, normed);
  }
  norm(x, norm_, config_.norm_eps, hidden, pool);
}

void InferenceModel::logits(const View<const float, 2>& hidden, const View<float, 2>& logits, ThreadPool& pool) const {
  head_.apply(hidden, logits, pool);
}

void round_weights(LanguageModel& model, WeightType weights) {
  const torch::NoGradGuard no_grad;
  const bool tied = model.config().tie_word_embeddings;
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() != 2 || (parameter.key() == "model.embeddings.weight" && !tied)) continue;
    const auto cpu = parameter.value().detach().cpu();
    torch::Tensor(parameter.value()).copy_(PackedWeight({cpu}, weights).widened());
  }
}

}  // namespace efla::nn
