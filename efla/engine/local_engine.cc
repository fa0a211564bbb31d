#include "efla/engine/local_engine.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "efla/base/check.h"
#include "efla/engine/end_ids.h"
#include "efla/engine/reply_text.h"
#include "efla/nn/models/language_model_file.h"

namespace efla::engine {
namespace {

Histogram seconds() {
  Histogram histogram;
  histogram.bounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0};
  histogram.counts.resize(histogram.bounds.size() + 1);
  return histogram;
}

const EngineOptions& checked(const EngineOptions& options) {
  const Require require("engine");
  require(options.step_tokens >= 0 && options.step_tokens % nn::kCutTokens == 0, "step_tokens", options.step_tokens,
          "a multiple of " + std::to_string(nn::kCutTokens));
  require(options.step_time.count() >= 0, "step_time", options.step_time.count(), "a time in milliseconds");
  require(options.max_texts >= 1, "max_texts", options.max_texts, "at least one");
  require(options.draft_tokens >= 0 && options.draft_tokens < nn::kMostDecoded, "draft_tokens", options.draft_tokens,
          "0 to " + std::to_string(nn::kMostDecoded - 1));
  require(options.draft_head >= 0 && options.draft_head < nn::kMostDecoded, "draft_head", options.draft_head,
          "0 to " + std::to_string(nn::kMostDecoded - 1));
  require(options.max_queue >= 0, "max_queue", options.max_queue, "a count");
  require(options.max_disposable >= 0, "max_disposable", options.max_disposable, "a count");
  require(options.threads >= 0 && options.threads <= 1024, "threads", options.threads, "0 to 1024");
  return options;
}

// Returns the bytes that each token adds to a state.
std::size_t token_bytes(const EngineModel& model) {
  const auto tokens = model.text_memory().page_tokens;
  return (model.layout(tokens).bytes() - model.layout(0).bytes()) / static_cast<std::size_t>(tokens);
}

// Describes a model to the engine's clients. Throws Error for a tokenizer with ids that the model does not have.
EngineInfo info_of(const EngineModel& model, std::string sha256, std::int64_t parameters,
                   const data::Tokenizer& tokenizer, const EngineOptions& options) {
  const auto& config = model.config();
  const auto layout = model.layout(model.text_memory().page_tokens);
  Require("engine")(tokenizer.vocab_size() <= config.vocab_size, "tokenizer",
                    tokenizer.info().name + " of " + std::to_string(tokenizer.vocab_size()) + " tokens",
                    "at most the " + std::to_string(config.vocab_size) + " of the model's vocabulary");
  return {std::move(sha256),
          options.weights,
          layout.pages > 0 ? std::string(nn::name_of(layout.page_type)) : "",
          parameters,
          config.vocab_size,
          tokenizer.bos() >= 0 ? tokenizer.bos() : static_cast<std::int32_t>(config.bos_token_id.value_or(-1)),
          options.ends_texts ? end_ids(tokenizer, config) : std::vector<std::int32_t>(),
          model.layout(0).bytes(),
          token_bytes(model),
          options.max_queue,
          &tokenizer};
}

Schedule::Limits limits_of(const EngineOptions& options, const Capabilities& model) {
  constexpr std::int64_t kStepTokens = 512, kStepTokensOnGpu = 8192;  // a GPU needs more to be busy
  constexpr std::int64_t kLeastOnGpu = 512;                           // a GPU takes about as long for fewer
  const std::int64_t usual = model.in_process ? kStepTokens : kStepTokensOnGpu;
  return {.step_tokens = options.step_tokens > 0 ? options.step_tokens : usual,
          .step_time = options.step_time,
          .cut_tokens = model.cut_tokens,
          .least_tokens = model.in_process ? model.cut_tokens : kLeastOnGpu,
          .draft_tokens = std::min(std::max(options.draft_tokens, options.draft_head), model.most_drafted),
          .most_drafting = model.most_drafting,
          .most_decoded = nn::kMostDecoded};
}

}  // namespace

LocalEngine::LocalEngine(const nn::LanguageModel& model, std::shared_ptr<const data::Tokenizer> tokenizer,
                         const EngineOptions& options)
    : LocalEngine(make_cpu_model(model, nn::parse_weight_type(options.weights)), fingerprint(model),
                  model.parameter_count(), std::move(tokenizer), options) {}

LocalEngine::LocalEngine(std::unique_ptr<EngineModel> model, std::string model_sha256, std::int64_t parameters,
                         std::shared_ptr<const data::Tokenizer> tokenizer, const EngineOptions& options)
    : options_(checked(options)),
      tokenizer_(std::move(tokenizer)),
      model_(std::move(model)),
      capabilities_(model_->capabilities()),
      text_memory_(model_->text_memory()),
      shares_pages_(model_->layout(text_memory_.page_tokens).pages > 0),
      info_(info_of(*model_, std::move(model_sha256), parameters, *tokenizer_, options)),
      drawable_(tokenizer_->vocab_size()),
      pool_(options.threads > 0 ? options.threads : available_processors()),
      store_({options.session_memory, options.swap, options.sessions, options.max_disposable},
             SessionFormat({info_.model_sha256, info_.kv_cache_type, info_.vocab_size, drawable_},
                           [this](std::int64_t tokens) { return model_->layout(tokens); })),
      cache_(options.cache_memory),
      schedule_(limits_of(options, capabilities_)) {
  const Room room = room_of(options, *model_);
  statistics_.slots = room.slots;
  free_pages_ = pages_ = room.pages;
  model_->make_slots(room.slots, room.pages);
  for (std::int64_t slot = statistics_.slots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  statistics_.pages = room.pages;
  statistics_.slot_bytes = text_memory_.constant;
  statistics_.page_bytes = text_memory_.page;
  statistics_.page_tokens = text_memory_.page_tokens;
  for (const auto reason : {FinishReason::stop, FinishReason::length, FinishReason::interrupted,
                            FinishReason::cancelled, FinishReason::deadline, FinishReason::error}) {
    statistics_.finished[reason] = 0;  // now, because the end of a request needs no memory
  }
  statistics_.queue_seconds = statistics_.first_token_seconds = statistics_.between_tokens_seconds = seconds();
  store_.load_files();
  thread_ = start_thread([this] { run(); });
}

LocalEngine::~LocalEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Statistics LocalEngine::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics now = statistics_;
  now.queued = static_cast<std::int64_t>(waiting_.size());
  now.sessions = store_.size();
  now.session_bytes = store_.bytes().memory;
  now.swapped_bytes = store_.bytes().files;
  now.set_aside = set_aside().size();
  return now;
}

void LocalEngine::run() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const auto wanted = [&] { return stopping_ || !waiting_.empty() || !running_.empty(); };
      changed_.wait(lock, wanted);
      if (stopping_ && waiting_.empty() && running_.empty()) return;
    }
    try {
      advance();
    } catch (const std::exception& error) {  // no memory for the step
      fail_running(error);
    }
  }
}

// Runs one step.
void LocalEngine::advance() {
  end_asked_and_late();
  admit();
  if (const Step step = plan(); !step.ids.empty()) {
    try {
      compute(step);
    } catch (const std::exception& error) {
      fail_running(error);
    }
  }
  for (auto it = running_.begin(); it != running_.end();) {
    const auto next = std::next(it);
    end_if_over(it);
    it = next;
  }
  schedule_.forget_clients([&](const std::string& client) {
    return std::ranges::any_of(running_, [&](const auto& reply) { return reply->request.client == client; });
  });
  const std::lock_guard lock(mutex_);
  ++statistics_.steps;
  statistics_.running = static_cast<std::int64_t>(running_.size());
  statistics_.used_pages = pages_ - free_pages_;
  statistics_.cache_bytes = cache_.bytes();
  statistics_.cache_entries = cache_.entries();
}

// Ends the requests that run, at the end of this step or at the beginning of the next one.
void LocalEngine::fail_running(const std::exception& error) noexcept {
  for (auto& reply : running_) {
    if (!reply->ended()) reply->fail(error);
  }
}

}  // namespace efla::engine
