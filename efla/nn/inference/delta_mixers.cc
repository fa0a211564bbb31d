#include "efla/nn/inference/delta_mixers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "efla/base/check.h"
#include "efla/ops/delta.h"
#include "efla/ops/layers/glu.h"
#include "efla/ops/layers/short_conv.h"
#include "efla/rule/activation.h"

namespace efla::nn {
namespace {

// Calls f(row) for every row, several rows per task.
template <class F>
void for_each_row(std::int64_t rows, ThreadPool& pool, F&& f) {
  constexpr std::int64_t kRows = 16;
  pool.run((rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    for (std::int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) f(row);
  });
}

}  // namespace

DeltaMixers::DeltaMixers(const MixerConfig& config)
    : plan_(config),
      memory_floats_(plan_.values() * plan_.config.key_dim),
      layer_floats_(memory_floats_ + (plan_.config.conv - 1) * plan_.channels()) {}

std::size_t DeltaMixers::weight_bytes() const {
  std::size_t total = 0;
  for (const auto& layer : layers_) {
    for (const auto* weight : {&layer.in, &layer.f_out, &layer.g_out, &layer.o_proj}) total += weight->bytes();
  }
  return total;
}

std::vector<StatePart> DeltaMixers::state_parts(std::span<const std::string> prefixes) const {
  std::vector<StatePart> parts;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const auto first = i * static_cast<std::size_t>(layer_floats_), memory = static_cast<std::size_t>(memory_floats_);
    parts.push_back({prefixes[i] + "memory",
                     {1, plan_.config.value_heads, plan_.config.key_dim, plan_.config.value_dim},
                     first,
                     memory});
    parts.push_back({prefixes[i] + "conv",
                     {1, plan_.config.conv - 1, plan_.channels()},
                     first + memory,
                     static_cast<std::size_t>(layer_floats_ - memory_floats_)});
  }
  return parts;
}

void DeltaMixers::begin(std::int64_t rows, std::span<const TextRun> runs, std::vector<Draft>* drafts) {
  rows_ = rows;
  decodes_ = 0;
  drafts_ = drafts;
  if (drafts != nullptr) drafts->clear();
  for (const auto& run : runs) {
    if (run.decode && run.tokens == 1) ++decodes_;
    if (!run.decode || run.tokens == 1) continue;
    Require("advance")(drafts != nullptr, "drafts", "none", "a list, because a text decodes several tokens");
    drafts->push_back({run, {}, {}, {}, {}, {}});
  }
}

// Computes beta [R, n·HV] and, with a gate, decay [R, HV] or [R, HV·K] from the projections.
void DeltaMixers::compute_gates(const Layer& layer, ThreadPool& pool) {
  const std::int64_t heads = plan_.config.value_heads, dim = plan_.config.key_dim;
  const View<float, 2> projected = projected_.rows(rows_, layer.in.outputs());
  const View<float, 2> beta = beta_.rows(rows_, plan_.betas());
  const bool by_channel = is_by_channel(plan_.gate);
  const View<float, 2> decay = decay_.rows(rows_, by_channel ? heads * dim : heads);
  if (plan_.f) layer.f_out.apply(columns_of(projected, plan_.f), decay, pool);
  const float bound = static_cast<float>(plan_.config.lower_bound.value_or(kGateLowerBound));
  for_each_row(rows_, pool, [&](std::int64_t row) {
    for (std::int64_t h = 0; h < plan_.betas(); ++h) {
      float value = 1.0F;
      if (plan_.b && !plan_.w) {
        const float b = projected(row, plan_.b.first + h);
        value = plan_.preset.beta == BetaActivation::sigmoid ? sigmoid(b) : softplus(b);
      }
      beta(row, h) = value * layer.beta_factor[static_cast<std::size_t>(h % heads)];
    }
    if (plan_.gate == Gate::none) return;
    for (std::int64_t c = 0; c < decay.extent[1]; ++c) {
      const float rate = layer.rate[static_cast<std::size_t>(by_channel ? c / dim : c)];
      const float z =
          (by_channel ? decay(row, c) : projected(row, plan_.a.first + c)) + layer.dt_bias[static_cast<std::size_t>(c)];
      decay(row, c) = plan_.gate == Gate::safe_channel ? bound * sigmoid(rate * z) : -rate * softplus(z);
      if (plan_.preset.erase_key == EraseKey::closed_loop) {
        decay(row, c) = std::max(decay(row, c), static_cast<float>(kClosedLoopLeastDecay));
      }
    }
  });
}

// Changes q or v in `mixed` as a rule with two keys asks (EraseKey), and computes its erase keys [R, H·K].
void DeltaMixers::form_keys(const Layer& layer, std::span<const TextRun> runs) {
  const std::int64_t kept = plan_.config.conv - 1, keys = plan_.keys(), dim = plan_.config.key_dim;
  const View<float, 2> projected = projected_.rows(rows_, layer.in.outputs());
  const View<float, 2> erase_key = erase_key_.rows(rows_, keys);
  const auto form = [&](std::int64_t row, float* q) {
    const float* k = q + keys;
    if (plan_.preset.erase_key == EraseKey::gated) {
      const float *b = projected.at(row) + plan_.b.first, *w = projected.at(row) + plan_.w.first;
      const float scale = static_cast<float>(plan_.config.beta_scale);
      for (std::int64_t c = 0; c < keys; ++c) erase_key(row, c) = scale * sigmoid(b[c]) * k[c];
      for (std::int64_t c = 0; c < plan_.values(); ++c) q[2 * keys + c] *= sigmoid(w[c]);
      return;
    }
    for (std::int64_t c = 0; c < keys; ++c) {
      erase_key(row, c) = std::exp(-decay_.data()[row * plan_.decays() + c / dim]) * k[c];
      q[c] -= layer.correction[static_cast<std::size_t>(c / dim)] * k[c];
    }
  };
  std::int64_t row = 0, at = 0;
  for (const auto& run : runs) {
    for (std::int64_t t = 0; t < run.tokens; ++t) form(row + t, mixed_.data() + (at + kept + t) * plan_.channels());
    row += run.tokens;
    at += kept + run.tokens;
  }
}

// Computes the short convolution of every run. The inputs before a run's first token are in the run's slot, and except
// for drafts the slot gets the last inputs of the run. The outputs of a run lie in `mixed` after W − 1 rows that are
// not read.
void DeltaMixers::convolve(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool) {
  const std::int64_t kept = plan_.config.conv - 1, count = static_cast<std::int64_t>(runs.size());
  const View<float, 2> projected = projected_.rows(rows_, layer.in.outputs());
  const View<float, 2> window = window_.rows(rows_ + count * kept, plan_.channels());
  const View<float, 2> mixed = mixed_.rows(rows_ + count * kept, plan_.channels());
  const auto bytes = [&](std::int64_t rows) {
    return static_cast<std::size_t>(rows * plan_.channels()) * sizeof(float);
  };
  const auto first_conv = static_cast<std::size_t>((&layer - layers_.data()) * layer_floats_ + memory_floats_);
  std::int64_t row = 0, at = 0;
  for (const auto& run : runs) {
    float* history = states.slot(run.slot).data() + first_conv;
    std::memcpy(window.at(at), history, bytes(kept));
    for (std::int64_t t = 0; t < run.tokens; ++t)
      std::memcpy(window.at(at + kept + t), projected.at(row + t), bytes(1));
    const bool draft = run.decode && run.tokens > 1;
    if (!draft) std::memcpy(history, window.at(at + run.tokens), bytes(kept));
    row += run.tokens;
    at += kept + run.tokens;
  }
  const auto part = [&](std::int64_t first, std::int64_t tokens) {
    ShortConvForward<float> p;
    p.x = View<const float, 3>::contiguous(window.at(first), {1, tokens, plan_.channels()});
    p.weight = View<const float, 2>::contiguous(layer.taps.data(), {plan_.channels(), plan_.config.conv});
    p.y = View<float, 3>::contiguous(mixed.at(first), {1, tokens, plan_.channels()});
    short_conv_forward(p, {.context = {.pool = &pool}});
  };
  // All decoded tokens form one sequence of W rows per token. The output of a token is in the last of its rows, which
  // depends only on these rows.
  if (decodes_ > 0) part(0, decodes_ * plan_.config.conv);
  at = decodes_ * plan_.config.conv;
  for (const auto& run : runs.subspan(static_cast<std::size_t>(decodes_))) {
    part(at, kept + run.tokens);
    at += kept + run.tokens;
  }
}

// Returns the rows with the keys and values of several steps per token copied to one row per step; other rows as they
// are.
MixerRows DeltaMixers::with_steps(MixerRows rows) {
  if (plan_.steps() == 1) return rows;
  const View<float, 2> k = step_keys_.rows(rows.texts * rows.tokens, plan_.step_keys());
  const View<float, 2> v = step_values_.rows(rows.texts * rows.tokens, plan_.step_values());
  for (std::int64_t row = 0; row < k.extent[0]; ++row) {
    const std::int64_t text = row / rows.tokens, token = row % rows.tokens;
    const float* keys = rows.qkv + text * rows.text_stride + token * plan_.channels() + plan_.keys();
    std::copy_n(keys, plan_.step_keys(), k.at(row));
    std::copy_n(keys + plan_.step_keys(), plan_.step_values(), v.at(row));
  }
  rows.k = k.data;
  rows.v = v.data;
  return rows;
}

// Computes a run of a prompt in parts that end at multiples of kCutTokens tokens of the text, so that the bits do not
// depend on the cutting of the prompt into runs. row: the run's first row of the gates; qkv: its first token's q, k and
// v.
void DeltaMixers::recur_prompt(const TextRun& run, std::int64_t row, const float* qkv, std::span<float> memory,
                               ThreadPool& pool) {
  const std::int64_t keys = plan_.rule.two_keys ? plan_.keys() : 0;
  for (std::int64_t done = 0; done < run.tokens;) {
    const std::int64_t begin = run.begin + done, end = run.begin + run.tokens;
    const std::int64_t whole = end / kCutTokens * kCutTokens, next = (begin / kCutTokens + 1) * kCutTokens;
    const std::int64_t stop = begin % kCutTokens != 0 ? std::min(next, end) : begin < whole ? whole : end;
    const std::int64_t tokens = stop - begin;
    auto p =
        mixer_problem<DeltaForward<float>>(plan_, with_steps({.tokens = tokens,
                                                              .qkv = qkv + done * plan_.channels(),
                                                              .text_stride = tokens * plan_.channels(),
                                                              .beta = beta_.data() + (row + done) * plan_.betas(),
                                                              .decay = decay_.data() + (row + done) * plan_.decays(),
                                                              .o = o_.data() + (row + done) * plan_.values(),
                                                              .erase_key = erase_key_.data() + (row + done) * keys}));
    p.initial_state = states_view(plan_, memory.data(), 1);
    p.final_state = states_view(plan_, final_state_.rows(1, memory_floats_).data, 1);
    delta_forward(p, {.context = {.pool = &pool}});
    std::copy_n(final_state_.data(), memory_floats_, memory.data());
    done += tokens;
  }
}

// Computes the delta rule of all runs: the decoded tokens in one call, then drafts and runs of prompts one after the
// other.
void DeltaMixers::recur(const Layer& layer, std::span<const TextRun> runs, StatePool& states, ThreadPool& pool) {
  const std::int64_t kept = plan_.config.conv - 1, channels = plan_.channels();
  const std::int64_t layer_first = (&layer - layers_.data()) * layer_floats_;
  o_.rows(rows_, plan_.values());
  if (decodes_ > 0) {
    std::vector<std::int64_t> slots;
    for (const auto& run : runs.first(static_cast<std::size_t>(decodes_))) slots.push_back(run.slot);
    auto p = mixer_problem<DeltaSteps<float>>(plan_, with_steps({.texts = decodes_,
                                                                 .qkv = mixed_.data() + kept * channels,
                                                                 .text_stride = plan_.config.conv * channels,
                                                                 .beta = beta_.data(),
                                                                 .decay = decay_.data(),
                                                                 .o = o_.data(),
                                                                 .erase_key = erase_key_.data()}));
    p.slots = View<const std::int64_t, 1>::contiguous(slots.data(), {decodes_});
    p.states = states_view(plan_, states.slot(0).data() + layer_first, states.slots());
    p.states.stride[0] = static_cast<std::int64_t>(state_floats());
    delta_steps(p, {.context = {.pool = &pool}});
  }
  std::int64_t row = decodes_, at = decodes_ * plan_.config.conv;
  std::size_t draft = 0;
  for (const auto& run : runs.subspan(static_cast<std::size_t>(decodes_))) {
    const auto memory =
        states.slot(run.slot).subspan(static_cast<std::size_t>(layer_first), static_cast<std::size_t>(memory_floats_));
    if (run.decode) {
      Draft& kept_draft = (*drafts_)[draft++];
      keep_draft(kept_draft, row, at);
      const std::span<float> tried(final_state_.rows(1, memory_floats_).data, memory.size());
      std::copy(memory.begin(), memory.end(), tried.begin());
      recur_draft(kept_draft, &layer - layers_.data(), run.tokens, tried, o_.data() + row * plan_.values(), pool);
    } else {
      recur_prompt(run, row, mixed_.data() + (at + kept) * plan_.channels(), memory, pool);
    }
    row += run.tokens;
    at += kept + run.tokens;
  }
}

// Appends to a draft what its recurrence needs in this layer. row: the draft's first row in beta and decay; at: its
// first row in window and mixed.
void DeltaMixers::keep_draft(Draft& draft, std::int64_t row, std::int64_t at) {
  const std::int64_t tokens = draft.run.tokens;
  const auto append = [](Vector& to, const float* first, std::int64_t count) {
    to.insert(to.end(), first, first + count);
  };
  const std::int64_t floats = (plan_.config.conv - 1 + tokens) * plan_.channels();
  append(draft.window, window_.data() + at * plan_.channels(), floats);
  append(draft.mixed, mixed_.data() + at * plan_.channels(), floats);
  append(draft.beta, beta_.data() + row * plan_.betas(), tokens * plan_.betas());
  append(draft.decay, decay_.data() + row * plan_.decays(), tokens * plan_.decays());
  if (plan_.rule.two_keys) {
    append(draft.erase_key, erase_key_.data() + row * plan_.keys(), tokens * plan_.keys());
  }
}

// Computes the recurrence of the first tokens of a draft in one layer, and updates `memory`.
void DeltaMixers::recur_draft(const Draft& draft, std::int64_t layer, std::int64_t tokens, std::span<float> memory,
                              float* o, ThreadPool& pool) {
  const std::int64_t all = draft.run.tokens, kept = plan_.config.conv - 1;
  auto p = mixer_problem<DeltaSteps<float>>(
      plan_,
      with_steps({.tokens = tokens,
                  .qkv = draft.mixed.data() + (layer * (kept + all) + kept) * plan_.channels(),
                  .text_stride = tokens * plan_.channels(),
                  .beta = draft.beta.data() + layer * all * plan_.betas(),
                  .decay = draft.decay.data() + layer * all * plan_.decays(),
                  .o = o,
                  .erase_key = draft.erase_key.data() + layer * all * (plan_.rule.two_keys ? plan_.keys() : 0)}));
  p.states = states_view(plan_, memory.data(), 1);
  delta_steps(p, {.context = {.pool = &pool}});
}

void DeltaMixers::accept(const Draft& draft, std::int64_t tokens, StatePool& states, ThreadPool& pool) {
  const std::int64_t rows = plan_.config.conv - 1;
  for (std::int64_t layer = 0; layer < std::ssize(layers_); ++layer) {
    const auto slot =
        states.slot(draft.run.slot)
            .subspan(static_cast<std::size_t>(layer * layer_floats_), static_cast<std::size_t>(layer_floats_));
    recur_draft(draft, layer, tokens, slot.first(static_cast<std::size_t>(memory_floats_)),
                o_.rows(tokens, plan_.values()).data, pool);
    std::copy_n(draft.window.begin() + (layer * (rows + draft.run.tokens) + tokens) * plan_.channels(),
                rows * plan_.channels(), slot.begin() + memory_floats_);
  }
}

void DeltaMixers::mix(std::int64_t index, const View<float, 2>& x, const View<float, 2>& y,
                      std::span<const TextRun> runs, StatePool& states, ThreadPool& pool) {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const View<float, 2> projected = projected_.rows(rows_, layer.in.outputs());
  layer.in.apply(x, projected, pool);
  convolve(layer, runs, states, pool);
  compute_gates(layer, pool);
  if (plan_.rule.two_keys) form_keys(layer, runs);
  recur(layer, runs, states, pool);
  const View<float, 2> o = o_.rows(rows_, plan_.values());
  if (plan_.config.output_norm) {
    const auto heads = View<float, 2>::contiguous(o.data, {rows_ * plan_.config.value_heads, plan_.config.value_dim});
    norm_rows(heads, layer.o_norm, plan_.config.norm_eps, heads, pool);
  }
  const OutputGate output_gate = plan_.config.output_gate;
  if (is_full_rank(output_gate)) {
    glu_forward<float>({columns_of(projected, plan_.g), o, o, activation_of(output_gate)},
                       {.context = {.pool = &pool}});
  } else if (output_gate == OutputGate::sigmoid) {
    const View<float, 2> gate = gate_.rows(rows_, plan_.values());
    layer.g_out.apply(columns_of(projected, plan_.g), gate, pool);
    for (std::int64_t row = 0; row < rows_; ++row) {
      for (std::int64_t c = 0; c < plan_.values(); ++c) gate(row, c) += layer.gate_bias[static_cast<std::size_t>(c)];
    }
    glu_forward<float>({gate, o, o, GateActivation::sigmoid}, {.context = {.pool = &pool}});
  }
  layer.o_proj.apply(o, y, pool);
}

}  // namespace efla::nn
