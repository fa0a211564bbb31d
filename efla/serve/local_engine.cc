#include "efla/serve/local_engine.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "efla/base/check.h"
#include "efla/base/memory.h"
#include "efla/generate/end_ids.h"
#include "efla/generate/reply_text.h"
#include "efla/generate/session.h"
#include "efla/nn/models/language_model_file.h"

namespace efla::serve {
namespace {

constexpr std::size_t kMostSlots = 1 << 16;

Histogram seconds() {
  Histogram histogram;
  histogram.bounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0};
  histogram.counts.resize(histogram.bounds.size() + 1);
  return histogram;
}

const EngineOptions& checked(const EngineOptions& options) {
  const Require require("engine");
  require(options.step_tokens >= nn::kCutTokens && options.step_tokens % nn::kCutTokens == 0, "step_tokens",
          options.step_tokens, "a multiple of " + std::to_string(nn::kCutTokens));
  require(options.step_time.count() >= 0, "step_time", options.step_time.count(), "a time in milliseconds");
  require(options.draft_tokens >= 0 && options.draft_tokens < nn::kMostDecoded, "draft_tokens", options.draft_tokens,
          "0 to " + std::to_string(nn::kMostDecoded - 1));
  require(options.max_queue >= 0, "max_queue", options.max_queue, "a count");
  require(options.max_disposable >= 0, "max_disposable", options.max_disposable, "a count");
  require(options.threads >= 0 && options.threads <= 1024, "threads", options.threads, "0 to 1024");
  return options;
}

std::int64_t slots_of(const EngineOptions& options, const EngineModel& model) {
  const std::size_t slot = model.slot_bytes();
  const Require require("engine");
  require(options.state_memory >= slot, "state_memory", options.state_memory,
          "at least the " + std::to_string(slot) + " bytes of one text's state");
  const std::size_t states = model.on_gpu() ? 0 : options.state_memory;
  const double all =
      double(states) + double(options.session_memory) + double(options.cache_memory) + double(model.weight_bytes());
  std::pair largest{states, "state_memory"};
  if (options.session_memory > largest.first) largest = {options.session_memory, "session_memory"};
  if (options.cache_memory > largest.first) largest = {options.cache_memory, "cache_memory"};
  require_memory("engine", largest.second, "states, sessions, cache and weights", all);
  return static_cast<std::int64_t>(std::min(options.state_memory / slot, kMostSlots));
}

std::size_t bytes_of(const std::vector<nn::StatePart>& parts) {
  return (parts.back().offset + parts.back().floats) * sizeof(float);
}

}  // namespace

LocalEngine::LocalEngine(const nn::LanguageModel& model, std::unique_ptr<data::Tokenizer> tokenizer,
                         const EngineOptions& options)
    : LocalEngine(make_cpu_engine_model(model, nn::parse_weight_type(options.weights)), generate::fingerprint(model),
                  model.parameter_count(), std::move(tokenizer), options) {}

LocalEngine::LocalEngine(std::unique_ptr<EngineModel> model, std::string model_sha256, std::int64_t parameters,
                         std::unique_ptr<data::Tokenizer> tokenizer, const EngineOptions& options)
    : options_(checked(options)),
      tokenizer_(std::move(tokenizer)),
      model_(std::move(model)),
      drawable_(tokenizer_->vocab_size()),
      pool_(options.threads > 0 ? options.threads : available_processors()),
      store_(options.session_memory, options.swap, options.max_disposable),
      cache_(options.cache_memory) {
  const auto& config = model_->config();
  Require("engine")(drawable_ <= config.vocab_size, "tokenizer",
                    tokenizer_->info().name + " of " + std::to_string(drawable_) + " tokens",
                    "at most the " + std::to_string(config.vocab_size) + " of the model's vocabulary");
  info_ = {std::move(model_sha256),
           options.weights,
           parameters,
           config.vocab_size,
           tokenizer_->bos() >= 0 ? tokenizer_->bos() : static_cast<std::int32_t>(config.bos_token_id.value_or(-1)),
           generate::end_ids(*tokenizer_, config),
           bytes_of(model_->state_parts()),
           options.max_queue,
           tokenizer_.get()};
  statistics_.slots = slots_of(options, *model_);
  model_->make_slots(statistics_.slots);
  for (std::int64_t slot = statistics_.slots; slot > 0; --slot) free_slots_.push_back(slot - 1);
  statistics_.slot_bytes = model_->slot_bytes();
  for (const auto reason : {FinishReason::stop, FinishReason::length, FinishReason::cancelled, FinishReason::deadline,
                            FinishReason::error}) {
    statistics_.finished[reason] = 0;  // now, because the end of a request needs no memory
  }
  statistics_.queue_seconds = statistics_.first_token_seconds = statistics_.between_tokens_seconds = seconds();
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

void LocalEngine::check(const Request& request) const {
  const Require require("request");
  validate(request.sampling, drawable_);
  require(request.max_tokens >= 0, "max_tokens", request.max_tokens, "a count of tokens");
  require(request.places >= 0 && request.places <= options_.max_queue, "places", request.places,
          "at most the " + std::to_string(options_.max_queue) + " of max_queue");
  require(request.logprobs >= -1 && request.logprobs <= kMaxLogprobs, "logprobs", request.logprobs,
          "at most " + std::to_string(kMaxLogprobs));
  require(slots_of(request) <= statistics_.slots, "state_memory", options_.state_memory,
          "at least the bytes of two states, because the stored text may end before a stop string");
  require(request.rewind >= 0, "rewind", request.rewind, "a count of tokens");
  const auto check_ids = [&](const char* field, const std::vector<std::int32_t>& ids) {
    const auto wrong = std::find_if(ids.begin(), ids.end(), [&](auto id) { return id < 0 || id >= drawable_; });
    if (wrong == ids.end()) return;
    throw Error("request", field, "token " + std::to_string(*wrong), "0 to " + std::to_string(drawable_ - 1));
  };
  check_ids("prompt", request.prompt);
  check_ids("stop_token_ids", request.stop_token_ids);
  generate::require_stop_strings("request", request.stop);
}

// Returns whether the prompt of a request that continues this text may start from a state of the prefix cache.
bool LocalEngine::uses_cache(const Request& request, const StoredText* from) const {
  return from == nullptr && !request.echo && options_.cache_memory > 0;
}

// Throws QueueFull unless the queue has room for `places` requests. mutex_ must be held.
void LocalEngine::require_places(std::int64_t places) const {
  const auto waiting = static_cast<std::int64_t>(waiting_.size());
  if (places == 0 || places <= options_.max_queue - waiting) return;
  throw QueueFull("engine: " + std::to_string(waiting) + " requests wait already");
}

RequestId LocalEngine::submit(Request request, std::shared_ptr<Listener> listener) {
  check(request);
  std::shared_ptr<const StoredText> text;
  if (!request.session.empty()) text = store_.get(request.session);
  auto from = text;
  std::optional<Replay> replay;
  if (request.rewind > 0) {
    replay = prepare_rewind(request, text.get());
    from = text->before;
  } else {
    Require("request")(!request.prompt.empty() || (from && !from->record.pending.empty()), "prompt", "no tokens",
                       "at least one, or a session whose text continues");
  }
  const std::string save_as = request.save_as;
  const std::int64_t places = request.places;
  auto names = uses_cache(request, from.get()) ? names_of_beginnings(request.prompt, request.client)
                                               : std::vector<std::string>();
  RequestId id = 0;
  {
    const std::lock_guard lock(mutex_);
    require_places(places);  // before other sessions make room for this one
    id = next_id_++;
  }
  auto job = std::make_unique<Job>(id, std::move(request), std::move(listener), std::move(from), replay, *tokenizer_,
                                   info_.vocab_size);
  job->beginnings = std::move(names);
  if (!save_as.empty()) store_.reserve(save_as, info_.session_bytes + job->record_bytes());
  try {
    if (!save_as.empty() && save_as == job->request.session && store_.peek(save_as) != text) {
      throw SessionInUse("engine", "session", "'" + save_as + "', which another request advanced meanwhile",
                         "a session that no request advances");
    }
    const std::lock_guard lock(mutex_);
    require_places(places);
    alive_.insert(id);
    waiting_.push_back(std::move(job));
  } catch (...) {
    if (!save_as.empty()) store_.release(save_as, nullptr, false);
    throw;
  }
  changed_.notify_all();
  return id;
}

void LocalEngine::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  if (alive_.contains(id)) cancelled_.insert(id);
  changed_.notify_all();
}

Statistics LocalEngine::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics now = statistics_;
  now.queued = static_cast<std::int64_t>(waiting_.size());
  now.sessions = store_.size();
  now.session_bytes = store_.bytes().memory;
  now.swapped_bytes = store_.bytes().files;
  return now;
}

// Ends requests that were cancelled or have missed their deadline.
void LocalEngine::end_cancelled_and_late() {
  Jobs over;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const auto mark = [&](Job& job) {
      if (stopping_ || cancelled_.contains(job.id)) {
        job.ended = FinishReason::cancelled;
      } else if (job.request.deadline && *job.request.deadline <= now && !job.closing()) {
        job.ended = FinishReason::deadline;
      }
      return job.ended.has_value();
    };
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto next = std::next(it);
      if (mark(**it)) over.splice(over.end(), waiting_, it);
      it = next;
    }
    for (auto& job : running_) mark(*job);
  }
  running_.splice(running_.begin(), over);
  for (auto it = running_.begin(); it != running_.end();) {
    const auto next = std::next(it);
    if ((*it)->ended) end(it);
    it = next;
  }
}

// Sets a slot to the state after a stored text, or of an empty text.
void LocalEngine::restore(std::int64_t slot, const StoredText* from) {
  if (from == nullptr || !from->state) return model_->clear(slot);
  model_->set(slot, [&](std::span<float> state) { from->state->copy_to(state); });
}

// Sets the request's slot to the state that its text starts from.
void LocalEngine::begin(Job& job) {
  job.queue_ms = std::chrono::duration<double, std::milli>(Clock::now() - job.submitted).count();
  std::vector<std::size_t> wanted;
  for (const auto tokens : job.request.cache_after) wanted.push_back(static_cast<std::size_t>(tokens / nn::kCutTokens));
  const auto plan = cache_.plan(job.beginnings, std::move(wanted));
  if (plan.state) {
    model_->set(job.slot, [&](std::span<float> state) { std::ranges::copy(*plan.state, state.begin()); });
    job.cached_tokens = static_cast<std::int64_t>(plan.known) * nn::kCutTokens;
    job.ids_fed = static_cast<std::size_t>(job.cached_tokens);
  } else {
    restore(job.slot, job.from().get());
  }
  job.store_after = plan.store_after;
  job.last_served = client_served_.contains(job.request.client) ? client_served_[job.request.client] : 0;
  job.begin_echo();
  end_if_fed(job);
  const std::lock_guard lock(mutex_);
  statistics_.queue_seconds.add(job.queue_ms / 1e3);
  if (!uses_cache(job.request, job.from().get())) return;
  statistics_.cache_queries += job.ids().size();
  statistics_.cache_hits += static_cast<std::uint64_t>(job.cached_tokens);
}

// Lets a request whose reply has ended prefill the end of its stored text.
void LocalEngine::close(Job& job) {
  if (!job.must_close()) return;
  try {
    switch (job.close()) {
      case Job::Before::current:
        break;
      case Job::Before::kept:
        model_->copy(job.kept_slot, job.slot);
        break;
      case Job::Before::from:
        restore(job.slot, job.from().get());
    }
  } catch (const std::exception& error) {
    job.fail(error);
  }
}

// Takes a request out, stores its session, and tells the listener.
void LocalEngine::end(Jobs::iterator place) {
  const std::unique_ptr<Job> job = std::move(*place);
  running_.erase(place);
  std::shared_ptr<StoredText> text;
  const bool whole = *job->ended == FinishReason::stop || *job->ended == FinishReason::length;
  if (job->slot >= 0) {
    if (whole && !job->request.save_as.empty()) {
      try {
        text = text_after(*job);
      } catch (const std::exception& error) {  // no memory for the session, or a state that is not finite
        job->fail(error);
      }
    }
    for (const auto slot : {job->slot, job->kept_slot}) {
      if (slot < 0) continue;
      model_->drop(slot);
      free_slots_.push_back(slot);
    }
  }
  if (!job->request.save_as.empty()) {
    try {
      store_.release(job->request.save_as, std::move(text), job->request.disposable);
    } catch (const std::exception& error) {
      job->fail(error);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    alive_.erase(job->id);
    cancelled_.erase(job->id);
    const auto usage = job->usage();
    statistics_.prompt_tokens += static_cast<std::uint64_t>(usage.prompt_tokens);
    statistics_.completion_tokens += static_cast<std::uint64_t>(usage.completion_tokens);
    ++statistics_.finished[*job->ended];
  }
  job->finish();
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
  end_cancelled_and_late();
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
    if ((*it)->ended) close(**it);
    if ((*it)->ended) end(it);
    it = next;
  }
  forget_clients();
  const std::lock_guard lock(mutex_);
  ++statistics_.steps;
  statistics_.running = static_cast<std::int64_t>(running_.size());
  statistics_.cache_bytes = cache_.bytes();
  statistics_.cache_entries = cache_.entries();
}

// Ends the requests that run, at the end of this step or at the beginning of the next one.
void LocalEngine::fail_running(const std::exception& error) noexcept {
  for (auto& job : running_) {
    if (!job->ended) job->fail(error);
  }
}

std::unique_ptr<LocalEngine> start_engine(const std::shared_ptr<nn::LanguageModel>& model,
                                          std::unique_ptr<data::Tokenizer> tokenizer, const EngineOptions& options) {
  if (!options.on_gpu) return std::make_unique<LocalEngine>(*model, std::move(tokenizer), options);
  std::string sha256 = generate::fingerprint(*model);
  const auto weights = nn::parse_weight_type(options.weights);
  model->to(torch::kCUDA);
  nn::round_weights(*model, weights);
  return std::make_unique<LocalEngine>(make_gpu_engine_model(model, weights), std::move(sha256),
                                       model->parameter_count(), std::move(tokenizer), options);
}

std::unique_ptr<Engine> load_engine(const std::filesystem::path& model, std::unique_ptr<data::Tokenizer> tokenizer,
                                    const EngineOptions& options) {
  return start_engine(nn::load_language_model(model), std::move(tokenizer), options);
}

}  // namespace efla::serve
