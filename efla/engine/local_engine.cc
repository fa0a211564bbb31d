#include "efla/engine/local_engine.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
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

void LocalEngine::check(const Request& request, std::size_t replies) const {
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
  require(replies >= 1, "listeners", replies, "at least one");
  require(replies == 1 || !request.stores(), "save_as", std::to_string(replies) + " replies", "one reply to store");
  require(!request.state.text || request.session.empty(), "state", "a state beside a session", "one of the two");
  require(!request.return_state || request.save_as.empty(), "return_state", "return_state beside save_as",
          "one of the two");
  const auto check_ids = [&](const char* field, const std::vector<std::int32_t>& ids) {
    const auto wrong = std::find_if(ids.begin(), ids.end(), [&](auto id) { return id < 0 || id >= drawable_; });
    if (wrong == ids.end()) return;
    throw Error("request", field, "token " + std::to_string(*wrong), "0 to " + std::to_string(drawable_ - 1));
  };
  check_ids("prompt", request.prompt);
  check_ids("stop_token_ids", request.stop_token_ids);
  require_stop_strings("request", request.stop);
}

// Returns whether the prompt may start from a state of the prefix cache.
bool LocalEngine::uses_cache(const Reply& reply) const {
  return reply.from() == nullptr && reply.forked() == nullptr && !reply.request.echo && options_.cache_memory > 0;
}

// Throws QueueFull unless the queue has room for `places` requests. mutex_ must be held.
void LocalEngine::require_places(std::int64_t places) const {
  std::int64_t waiting = 0;
  for (const auto& reply : waiting_) waiting += reply->replies();
  if (places == 0 || places <= options_.max_queue - waiting) return;
  throw QueueFull("engine: " + std::to_string(waiting) + " requests wait already");
}

RequestId LocalEngine::submit(Request request, std::vector<std::shared_ptr<Listener>> listeners) {
  check(request, listeners.size());
  auto text = std::static_pointer_cast<const StoredText>(request.state.text);
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
  RequestId id = 0;
  {
    const std::lock_guard lock(mutex_);
    require_places(places);  // before other sessions make room for this one
    id = next_id_++;
  }
  const auto replies = std::ssize(listeners);
  auto reply = std::make_unique<Reply>(id, std::move(request), std::move(listeners), std::move(from), replay,
                                       *tokenizer_, info_.vocab_size);
  require_pages(*reply);
  if (uses_cache(*reply)) reply->beginnings = names_of_beginnings(reply->ids(), reply->request.client);
  if (reply->request.stores()) reply->room = store_.reserve(save_as, most_stored_bytes(*reply));
  if (!save_as.empty() && save_as == reply->request.session && store_.peek(save_as) != text) {
    throw SessionInUse("engine", "session", "'" + save_as + "', which another request advanced meanwhile",
                       "a session that no request advances");
  }
  {
    Replies queued;
    queued.push_back(std::move(reply));
    const std::lock_guard lock(mutex_);
    require_places(places);
    alive_[id] = replies;
    waiting_.splice(waiting_.end(), queued);
  }
  changed_.notify_all();
  return id;
}

void LocalEngine::ask(RequestId id, std::set<RequestId>& asked) {
  const std::lock_guard lock(mutex_);
  if (alive_.contains(id)) asked.insert(id);
  changed_.notify_all();
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

// Ends requests that were cancelled, interrupted, or have missed their deadline.
void LocalEngine::end_asked_and_late() {
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const auto end_if_asked = [&](Reply& reply) {
      const bool closing = reply.state() == Reply::State::closing;
      if (reply.ended()) return true;
      if (stopping_ || cancelled_.contains(reply.id)) {
        reply.end(FinishReason::cancelled);
      } else if (interrupted_.contains(reply.id) && !closing) {
        reply.end(reply.slot < 0 ? FinishReason::cancelled : FinishReason::interrupted);
      } else if (reply.request.deadline && *reply.request.deadline <= now && !closing) {
        reply.end(FinishReason::deadline);
      }
      return reply.ended();
    };
    for (auto& reply : running_) end_if_asked(*reply);
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto next = std::next(it);
      if (end_if_asked(**it)) running_.splice(running_.begin(), waiting_, it);
      it = next;
    }
  }
  for (auto it = running_.begin(); it != running_.end();) {
    const auto next = std::next(it);
    if ((*it)->ended()) end(it);
    it = next;
  }
}

// Lets requests begin as long as there are slots and pages for the one that is next: later requests wait with it.
void LocalEngine::admit() {
  while (!free_slots_.empty()) {
    std::map<std::string, std::int64_t> running;
    for (const auto& reply : running_) ++running[reply->request.client];
    Replies::iterator chosen;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return;
      std::vector<Schedule::Waiting> waiting;
      for (const auto& reply : waiting_) waiting.push_back({&reply->request.client, reply->id});
      chosen = std::next(waiting_.begin(), static_cast<std::ptrdiff_t>(schedule_.next(waiting, running)));
      if (std::cmp_less(free_slots_.size(), slots_of((*chosen)->request))) return;
      if (free_pages_ < pages_to_begin(**chosen)) return;
      running_.splice(running_.end(), waiting_, chosen);
    }
    try {
      begin(**chosen);
    } catch (const std::exception& error) {
      (*chosen)->fail(error);
    }
    end_if_over(chosen);
  }
}

// Sets a slot to the state after a stored text, or of an empty text.
void LocalEngine::restore(std::int64_t slot, const StoredText* from) {
  if (from == nullptr || !from->state) return model_->clear(slot);
  model_->set(slot, from->state->get());
}

// Sets the request's slot to the state that its text starts from.
void LocalEngine::begin(Reply& reply) {
  take_memory(reply);
  reply.queue_ms = std::chrono::duration<double, std::milli>(Clock::now() - reply.submitted).count();
  std::vector<std::size_t> wanted;
  for (const auto tokens : reply.request.cache_after)
    wanted.push_back(static_cast<std::size_t>(tokens / nn::kCutTokens));
  const auto plan = cache_.plan(reply.beginnings, std::move(wanted));
  const auto cached = plan.state ? plan.known * nn::kCutTokens : 0;
  reply.begin(cached);
  if (reply.forked() != nullptr) {
    model_->set(reply.slot, reply.forked()->state);
  } else if (plan.state) {
    std::vector<const void*> pages;
    for (const auto& page : plan.state->pages) pages.push_back(page.get());
    hold_pages(reply, pages);
    model_->set(reply.slot, *plan.state);
  } else {
    restore(reply.slot, reply.from().get());
  }
  const auto cut = static_cast<std::size_t>(capabilities_.cut_tokens / nn::kCutTokens);
  for (const auto beginning : plan.store_after) {  // where the model may cut the prompt
    if (beginning >= cut) reply.store_after.push_back(beginning / cut * cut);
  }
  reply.last_served = schedule_.served(reply.request.client);
  reply.begin_echo();
  {
    const std::lock_guard lock(mutex_);
    statistics_.queue_seconds.add(reply.queue_ms / 1e3);
    if (uses_cache(reply)) {
      statistics_.cache_queries += reply.ids().size();
      statistics_.cache_hits += cached;
    }
  }
  if (reply.forked() != nullptr) {
    auto logits = reply.forked()->logits;
    reply.forget_fork();
    take(reply, reply.outcome_of(logits, drawable_, std::nullopt));
  }
  reply.end_if_read();
}

// Lets a request whose reply has ended prefill the end of its stored text.
void LocalEngine::close(Reply& reply) {
  if (!reply.must_close()) return;
  try {
    switch (reply.close()) {
      case Reply::Before::current:
        break;
      case Reply::Before::kept:
        model_->copy(reply.kept_slot, reply.slot, reply.state_tokens());
        break;
      case Reply::Before::from:
        restore(reply.slot, reply.from().get());
    }
  } catch (const std::exception& error) {
    reply.fail(error);
  }
}

void LocalEngine::end_if_over(Replies::iterator reply) {
  if ((*reply)->ended()) close(**reply);
  if ((*reply)->ended()) end(reply);
}

// Takes a request out, stores its text, and tells the listeners.
void LocalEngine::end(Replies::iterator place) {
  const std::shared_ptr<Reply> reply = std::move(*place);
  running_.erase(place);
  std::shared_ptr<StoredText> text;
  const bool begun = reply->slot >= 0;
  try {  // which fails without memory for the session, and for a state that is not finite
    if (begun && is_whole(reply->reason()) && reply->request.stores()) text = text_after(*reply);
  } catch (const std::exception& error) {
    reply->fail(error);
  }
  if (begun) free_memory(*reply);
  count_end(*reply);
  const std::size_t bytes = begun ? state_bytes(reply->state_tokens()) : 0;
  SessionStore::Reservation room = std::move(reply->room);
  if (!text) {
    room = {};  // before the listener can ask for the name again
    return reply->finish(bytes);
  }
  HeldText held;
  if (reply->request.return_state) held = held_text(text);
  try {
    store_.store(std::move(room), std::move(text), reply->request.disposable,
                 [reply, bytes, held](const std::string& error) {
                   if (!error.empty()) reply->fail(std::runtime_error(error));
                   reply->finish(bytes, held);
                 });
  } catch (const std::exception& error) {
    reply->fail(error);
    reply->finish(bytes);
  }
}

// Counts a request that has ended.
void LocalEngine::count_end(const Reply& reply) {
  const std::lock_guard lock(mutex_);
  const auto replies = reply.replies();
  if (const auto alive = alive_.find(reply.id); (alive->second -= replies) == 0) {
    alive_.erase(alive);
    cancelled_.erase(reply.id);
    interrupted_.erase(reply.id);
  }
  const auto usage = reply.usage();
  statistics_.prompt_tokens += static_cast<std::uint64_t>(usage.prompt_tokens);
  statistics_.completion_tokens += static_cast<std::uint64_t>(usage.completion_tokens);
  statistics_.finished[reply.reason()] += static_cast<std::uint64_t>(replies);
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

std::unique_ptr<LocalEngine> start_engine(const std::shared_ptr<nn::LanguageModel>& model,
                                          std::shared_ptr<const data::Tokenizer> tokenizer,
                                          const EngineOptions& options) {
  const auto weights = nn::parse_weight_type(options.weights);
  std::string sha256 = options.keep_sessions ? fingerprint(*model) : "";  // before the weights are rounded
  const auto drawable = tokenizer->vocab_size();
  const bool grows = model->config().has_attention();
  std::unique_ptr<EngineModel> made;
  if (options.on_gpu) {
    model->to(torch::kCUDA);
    nn::round_weights(*model, weights);
    made = grows ? make_torch_model(model, std::make_shared<nn::GpuDecoder>(*model, weights, drawable))
                 : make_gpu_model(model, weights, drawable);
  } else if (weights != nn::WeightType::float32 || nn::InferenceModel::refusal(model->config()).empty()) {
    made = make_cpu_model(*model, weights);
  } else {
    made = make_torch_model(model);
  }
  return std::make_unique<LocalEngine>(std::move(made), std::move(sha256), model->parameter_count(),
                                       std::move(tokenizer), options);
}

namespace {

// Starts an engine over a model of a family (nn/families).
std::unique_ptr<Engine> start_family_engine(const std::filesystem::path& folder,
                                            std::shared_ptr<const data::Tokenizer> tokenizer,
                                            const EngineOptions& options) {
  const auto weights = nn::parse_weight_type(options.weights);
  std::optional<nn::KeyValueType> kv_cache_type;
  if (options.kv_cache_type != "auto") kv_cache_type = nn::parse_kv_cache_type(options.kv_cache_type);
  const auto start = [&](const auto& model, std::unique_ptr<EngineModel> made) {
    return std::make_unique<LocalEngine>(std::move(made), options.keep_sessions ? model->fingerprint() : "",
                                         model->parameters(), tokenizer, options);
  };
  if (options.on_gpu) {
    Require("engine")(options.draft_head == 0, "draft_head", options.draft_head, "0 on a GPU");
    const auto model =
        std::make_shared<nn::GpuFamilyModel>(folder, weights, tokenizer->vocab_size(), torch::kCUDA, kv_cache_type);
    return start(model, make_family_model(model));
  }
  const auto model = std::make_shared<nn::FamilyModel>(
      folder, weights, kv_cache_type.value_or(nn::KeyValueType::float32), options.draft_head > 0);
  return start(model, make_family_model(model, weights));
}

}  // namespace

std::unique_ptr<Engine> load_engine(const std::filesystem::path& model,
                                    std::shared_ptr<const data::Tokenizer> tokenizer, const EngineOptions& options) {
  if (nn::is_family_folder(model)) return start_family_engine(model, std::move(tokenizer), options);
  Require("engine")(options.kv_cache_type == "auto", "kv_cache_type", options.kv_cache_type,
                    "auto for a model that is not a hybrid from Hugging Face");
  Require("engine")(options.draft_head == 0, "draft_head", options.draft_head,
                    "0 for a model without a head for drafts");
  return start_engine(nn::load_language_model(model), std::move(tokenizer), options);
}

}  // namespace efla::engine
