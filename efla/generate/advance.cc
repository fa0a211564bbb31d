#include "efla/generate/advance.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/generate/batch_sampler.h"
#include "efla/ops/context.h"
#include "efla/torch/host_copy.h"

namespace efla::generate {
namespace {

// Tokens per call of an InferenceModel.
constexpr std::int64_t kInferencePiece = 512;

// Removes the first `count` pending ids from a session and returns them [count].
torch::Tensor taken(Session& session, std::size_t count) {
  const auto ids = torch::tensor(at::IntArrayRef(session.pending.data(), count), torch::kLong);
  session.pending.erase(session.pending.begin(), session.pending.begin() + static_cast<std::ptrdiff_t>(count));
  return ids;
}

// Prefills the first `count` pending ids. Returns the logits [vocab_size] after them.
torch::Tensor prefill(const nn::LanguageModel& model, const nn::GpuDecoder* decoder, Session& session,
                      std::size_t count) {
  const auto ids = taken(session, count).unsqueeze(0);
  const auto logits = decoder != nullptr ? decoder->prefill(ids, session.state) : model.prefill(ids, session.state);
  return logits.squeeze(0).to(torch::kCPU).contiguous();
}

// Makes a drawn id the only pending one. Returns the id.
std::int64_t add_drawn(std::int64_t id, Session& session) {
  ++session.draws;
  session.seen.add(id);
  session.pending = {id};
  return id;
}

}  // namespace

void require_pending(const Session& session) {
  if (!session.pending.empty()) return;
  throw Error("generate", "prompt", "an empty text", "at least one token");
}

std::int64_t draw(std::span<const float> logits, Session& session, const SamplingOptions& options) {
  Random random(session.seed, session.draws);
  return add_drawn(sample(logits, session.seen, options, random), session);
}

void draw_rows(const nn::GpuDecoder::Output& output, std::span<Session* const> sessions, const SamplingOptions& options,
               std::int64_t limit, const std::function<void(std::size_t row, std::int64_t id)>& drawn,
               const std::function<void(const torch::Tensor& ids)>& go_on) {
  const bool known = output.likeliest.defined() && options.temperature == 0.0 && options.repetition_penalty == 1.0;
  std::vector<Draw> rows;
  for (const Session* session : sessions) {
    rows.push_back(session == nullptr ? Draw{} : Draw{&session->seen, session->seed, session->draws});
  }
  const auto all = known ? output.likeliest : sample_rows(output.logits.narrow(1, 0, limit), rows, options);
  libtorch::HostCopy copy(all);
  if (go_on) go_on(all.select(1, 0).to(torch::kLong));
  const auto values = copy.get().accessor<double, 2>();
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (sessions[i] == nullptr) continue;
    const auto row = static_cast<std::int64_t>(i);
    if (std::isfinite(values[row][1])) {
      drawn(i, add_drawn(static_cast<std::int64_t>(values[row][0]), *sessions[i]));
    } else if (go_on) {
      throw std::runtime_error("generate: the largest logit of a text is " + std::to_string(values[row][1]));
    } else {  // says which logit is wrong
      const auto logits = output.logits[row].to(torch::kCPU);
      drawn(i, draw({logits.data_ptr<float>(), static_cast<std::size_t>(limit)}, *sessions[i], options));
    }
  }
}

Advance::Advance(const nn::LanguageModel& model, nn::InferenceModel* inference, const nn::GpuDecoder* decoder,
                 Session& session)
    : model_(model), inference_(inference), decoder_(decoder), session_(session) {
  if (inference_ == nullptr) return;
  states_.emplace(1, inference_->state_floats());
  inference_->copy_state(session.state, states_->slot(0));
  logits_ = torch::empty({nn::kMostDecoded, inference_->config().vocab_size});
}

Advance::~Advance() {
  if (states_) inference_->copy_state(states_->slot(0), session_.state);
}

std::int64_t Advance::draw(const SamplingOptions& options, std::int64_t limit, bool decode, bool ahead) {
  require_pending(session_);
  if (decoder_ != nullptr) return draw_by_decoder(options, limit, ahead);
  const auto logits = take(session_.pending.size(), decode);
  return generate::draw({logits.data_ptr<float>(), static_cast<std::size_t>(limit)}, session_, options);
}

std::int64_t Advance::draw_by_decoder(const SamplingOptions& options, std::int64_t limit, bool ahead) {
  nn::GpuDecoder::Output output;
  if (ahead_) {
    output = *std::exchange(ahead_, std::nullopt);
  } else if (session_.pending.size() == 1) {
    output = decoder_->step(taken(session_, 1), session_.state);
  } else {
    output.logits = decoder_->prefill(taken(session_, session_.pending.size()).unsqueeze(0), session_.state);
  }
  Session* const sessions[] = {&session_};
  std::int64_t id = 0;
  std::function<void(const torch::Tensor&)> go_on;
  if (ahead) go_on = [&](const torch::Tensor& ids) { ahead_ = decoder_->step_drawn(ids, session_.state); };
  draw_rows(
      output, sessions, options, limit, [&](std::size_t, std::int64_t drawn) { id = drawn; }, go_on);
  return id;
}

torch::Tensor Advance::take(std::size_t count, bool decode) {
  if (!states_) return prefill(model_, decoder_, session_, count);
  const auto& config = inference_->config();
  for (std::size_t at = 0; at < count;) {
    const std::int64_t begin = session_.state.tokens, room = kInferencePiece - begin % nn::kCutTokens;
    const std::int64_t tokens = std::min(room, static_cast<std::int64_t>(count - at));
    const auto first = session_.pending.begin() + static_cast<std::ptrdiff_t>(at);
    const std::vector<std::int32_t> ids(first, first + tokens);
    const nn::TextRun run{0, begin, tokens, decode};
    hidden_.resize(static_cast<std::size_t>(tokens * config.hidden_size));
    inference_->advance(ids, {&run, 1}, *states_, rows(tokens, config.hidden_size), default_pool());
    session_.state.tokens += tokens;
    at += static_cast<std::size_t>(tokens);
    if (at < count) continue;
    compute_logits(tokens - 1, 1);
  }
  session_.pending.erase(session_.pending.begin(), session_.pending.begin() + static_cast<std::ptrdiff_t>(count));
  return logits_[0];
}

std::span<const std::int32_t> Advance::draft(std::span<const std::int32_t> prompt, std::span<const std::int32_t> reply,
                                             std::int64_t most) {
  return states_ ? lookup_.draft(prompt, reply, most) : std::span<const std::int32_t>();
}

torch::Tensor Advance::take_draft() {
  std::vector<std::int32_t> ids{static_cast<std::int32_t>(session_.pending.front())};
  ids.insert(ids.end(), lookup_.tokens().begin(), lookup_.tokens().end());
  const auto tokens = static_cast<std::int64_t>(ids.size()), width = inference_->config().hidden_size;
  hidden_.resize(static_cast<std::size_t>(tokens * width));
  const nn::TextRun run{0, session_.state.tokens, tokens, /*decode=*/true};
  inference_->advance(ids, {&run, 1}, *states_, rows(tokens, width), default_pool(), &drafts_);
  compute_logits(0, tokens);
  session_.pending.clear();
  return logits_.slice(0, 0, tokens);
}

void Advance::accept(std::size_t tokens) {
  inference_->accept(drafts_.front(), static_cast<std::int64_t>(tokens), *states_, default_pool());
  session_.state.tokens += static_cast<std::int64_t>(tokens);
  lookup_.end(tokens - 1);
}

// Computes the logits after rows of hidden_.
void Advance::compute_logits(std::int64_t first, std::int64_t count) {
  const auto& config = inference_->config();
  const auto hidden =
      View<const float, 2>::contiguous(hidden_.data() + first * config.hidden_size, {count, config.hidden_size});
  inference_->logits(hidden, View<float, 2>::contiguous(logits_.data_ptr<float>(), {count, config.vocab_size}),
                     default_pool());
}

View<float, 2> Advance::rows(std::int64_t count, std::int64_t columns) {
  return View<float, 2>::contiguous(hidden_.data(), {count, columns});
}

}  // namespace efla::generate
