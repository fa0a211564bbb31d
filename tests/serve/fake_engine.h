// An engine without a model: every reply follows a script, one token per step, so that tests know each byte.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/engine.h"

namespace efla::serve {

class FakeEngine : public engine::Engine {
 public:
  // Replies repeat the script, moved on by the seed; '$' in it ends the text.
  explicit FakeEngine(std::string script = "abcdefghij",
                      std::unique_ptr<data::Tokenizer> tokenizer = data::load_tokenizer("bytes"))
      : script_(std::move(script)), tokenizer_(std::move(tokenizer)) {
    thread_ = std::thread([this] { loop(); });
  }
  ~FakeEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  std::atomic<std::chrono::microseconds> step{std::chrono::microseconds(0)};
  std::atomic<std::chrono::milliseconds> prefill{std::chrono::milliseconds(0)};  // of any prompt; it can be cancelled
  std::atomic<std::size_t> max_queue = 1000;
  std::atomic<std::int64_t> pending = 1;  // of every session
  std::atomic<std::int64_t> cached = 0;   // tokens of every prompt
  std::function<void()> submitting;       // called by each submit
  std::atomic<int> cancelled = 0;
  std::atomic<std::uint64_t> steps = 0;

  // Returns the number of requests so far.
  int submitted() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(id_);
  }
  // Returns what was submitted last.
  engine::Request last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }
  // Returns the names of sessions that became disposable since the last call.
  std::vector<std::string> take_disposable() {
    const std::lock_guard lock(mutex_);
    return std::exchange(disposable_, {});
  }
  std::string text_of(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    return tokenizer_->decode(sessions_.at(name));
  }
  std::size_t stored() const {
    const std::lock_guard lock(mutex_);
    return sessions_.size();
  }

  engine::EngineInfo info() const override {
    return {.model_sha256 = "0123",
            .weights = "float32",
            .parameters = 7,
            .vocab_size = tokenizer_->vocab_size(),
            .bos = tokenizer_->bos(),
            .ends = {tokenizer_->eos()},
            .session_bytes = 1000,
            .token_bytes = 4,
            .max_queue = 1000,
            .tokenizer = tokenizer_.get()};
  }

  using engine::Engine::submit;
  // Each reply is a request of its own.
  engine::RequestId submit(engine::Request request, std::vector<std::shared_ptr<engine::Listener>> listeners) override {
    if (submitting) submitting();
    const std::lock_guard lock(mutex_);
    if (request.places > 0 && jobs_.size() + static_cast<std::size_t>(request.places) > max_queue) {
      throw engine::QueueFull("full");
    }
    if (!request.session.empty()) require(request.session);
    if (request.rewind > 0) {
      if (std::cmp_greater(request.rewind, sessions_.at(request.session).size())) {
        throw Error("serve", "tokens", std::to_string(request.rewind), "fewer");
      }
      request.max_tokens = 0;
    }
    last_ = request;
    last_.state = {};
    Job job;
    if (!request.session.empty()) job.text = sessions_.at(request.session);
    if (request.state.text) job.text = *static_cast<const Ids*>(request.state.text.get());
    job.text.resize(job.text.size() - static_cast<std::size_t>(request.rewind));
    job.old = job.text.size();
    job.text.insert(job.text.end(), request.prompt.begin(), request.prompt.end());
    job.request = std::move(request);
    job.ready = engine::Clock::now() + prefill.load();
    ++id_;
    std::vector<Job> jobs;
    for (auto& listener : listeners) {
      Job& own = jobs.emplace_back(job);
      own.text.reserve(own.text.size() + 1024);  // so that the engine's thread allocates little
      own.listener = std::move(listener);
      if (own.request.constraint) own.constraint = own.request.constraint->clone();
      ++job.request.sampling.seed;
      job.request.echo = false;
      job.request.prompt.clear();  // counts once
    }
    for (auto& own : jobs) jobs_.emplace(id_, std::move(own));
    wake_.notify_all();
    return id_;
  }

  void cancel(engine::RequestId id) override {
    const std::lock_guard lock(cancel_mutex_);
    cancels_.push_back(id);
  }
  void interrupt(engine::RequestId id) override { cancel(id); }

  std::vector<engine::SessionInfo> sessions() const override {
    const std::lock_guard lock(mutex_);
    std::vector<engine::SessionInfo> all;
    for (const auto& [name, ids] : sessions_) all.push_back(info_of(name));
    return all;
  }
  engine::SessionInfo session(const std::string& name) const override {
    const std::lock_guard lock(mutex_);
    require(name);
    return info_of(name);
  }
  void fork(const std::string& name, const std::string& copy) override {
    const std::lock_guard lock(mutex_);
    require(name);
    if (sessions_.contains(copy)) throw Error("serve", "copy", copy, "a new name");
    sessions_[copy] = sessions_.at(name);
  }
  std::string save(const std::string& name) const override { return "state:" + text_of_checked(name); }
  void load(const std::string& name, std::string_view bytes) override {
    if (bytes == "other") throw Error("serve", "session", "session " + name + " of another model", "one of this model");
    if (!bytes.starts_with("state:")) throw IoError(IoError::Kind::content, "session " + name, 3, "not a session");
    const std::lock_guard lock(mutex_);
    sessions_[name] = tokenizer_->encode(bytes.substr(6));
  }
  std::string save(const engine::HeldText& text) const override {
    return "state:" + tokenizer_->decode(*static_cast<const Ids*>(text.text.get()));
  }
  engine::HeldText read(std::string_view bytes) override {
    if (bytes == "other") throw Error("serve", "session", "session of another model", "one of this model");
    if (!bytes.starts_with("state:")) throw IoError(IoError::Kind::content, "session", 3, "not a session");
    return held(tokenizer_->encode(bytes.substr(6)));
  }
  // Returns how many texts are held that are not sessions.
  int held_texts() const { return held_texts_; }
  void erase(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    require(name);
    for (const auto& [id, job] : jobs_) {
      if (job.request.save_as == name) throw engine::SessionInUse("serve", "session", name, "one that is not in use");
    }
    sessions_.erase(name);
  }
  void make_disposable(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    require(name);
    disposable_.push_back(name);
  }
  engine::Statistics statistics() const override {
    const std::lock_guard lock(mutex_);
    engine::Statistics s;
    s.slots = 8;
    s.pages = 40;
    s.used_pages = 10;
    s.running = static_cast<std::int64_t>(jobs_.size());
    s.finished[engine::FinishReason::stop] = 3;
    s.cache_queries = 90;
    s.cache_hits = 64;
    s.drafted_tokens = 40;
    s.accepted_tokens = 30;
    s.first_token_seconds = {.bounds = {0.1, 1}, .counts = {2, 1, 1}, .sum = 3.5};
    s.queue_seconds = s.between_tokens_seconds = s.first_token_seconds;
    return s;
  }

 private:
  using Ids = std::vector<std::int32_t>;

  engine::HeldText held(Ids ids) {
    ++held_texts_;
    return {std::shared_ptr<const Ids>(new Ids(std::move(ids)),
                                       [this](const Ids* text) {
                                         delete text;
                                         --held_texts_;
                                       }),
            pending};
  }

  struct Job {
    engine::Request request;
    std::shared_ptr<engine::Listener> listener;
    std::vector<std::int32_t> text;
    std::size_t old = 0;  // tokens of the session it continues
    std::string reply;
    std::int64_t drawn = 0;
    bool scored = false;
    engine::Clock::time_point ready;
    std::shared_ptr<engine::Constraint> constraint = {};
  };

  using Jobs = std::multimap<engine::RequestId, Job>;  // a job per reply

  void require(const std::string& name) const {
    if (!sessions_.contains(name))
      throw engine::NoSuchSession("serve", "session", "'" + name + "'", "a stored session");
  }
  std::string text_of_checked(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    require(name);
    return tokenizer_->decode(sessions_.at(name));
  }
  engine::SessionInfo info_of(const std::string& name) const {
    const auto size = sessions_.at(name).size();
    return {.name = name,
            .tokens = static_cast<std::int64_t>(size),
            .rewindable = static_cast<std::int64_t>(size),
            .pending = pending,
            .bytes = 1000,
            .disposable = std::find(disposable_.begin(), disposable_.end(), name) != disposable_.end()};
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (jobs_.empty()) {
        wake_.wait(lock);
        continue;
      }
      std::vector<engine::RequestId> cancels;
      {
        const std::lock_guard cancel_lock(cancel_mutex_);
        cancels.swap(cancels_);
      }
      ++steps;
      std::vector<Jobs::iterator> round;
      for (auto job = jobs_.begin(); job != jobs_.end(); ++job) round.push_back(job);
      for (const auto job : round) {
        const bool cancel = std::find(cancels.begin(), cancels.end(), job->first) != cancels.end();
        if (advance(job->second, cancel, lock)) jobs_.erase(job);
      }
      lock.unlock();
      std::this_thread::sleep_for(step.load() + std::chrono::microseconds(1));
      lock.lock();
    }
  }

  // Returns a token, or the first one that the request's constraint allows instead.
  std::int32_t allowed(Job& job, std::int32_t id) const {
    if (!job.constraint) return id;
    std::vector<float> logits(static_cast<std::size_t>(tokenizer_->vocab_size()), 0.0F);
    logits[static_cast<std::size_t>(id)] = 1.0F;
    job.constraint->exclude(logits);
    id = static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());
    if (id != tokenizer_->eos()) job.constraint->take(id);
    return id;
  }

  // Returns whether the job is over. Calls listeners without the lock.
  bool advance(Job& job, bool cancel, std::unique_lock<std::mutex>& lock) {
    if (cancel) {
      ++cancelled;
      return end(job, engine::FinishReason::cancelled, "", lock);
    }
    if (job.request.deadline && engine::Clock::now() > *job.request.deadline)
      return end(job, engine::FinishReason::deadline, "", lock);
    if (engine::Clock::now() < job.ready) return false;
    if (job.request.echo && !job.scored) {
      job.scored = true;
      std::vector<engine::PromptToken> tokens;
      for (std::size_t i = 0; i < job.request.prompt.size(); ++i) {
        const auto id = job.request.prompt[i];
        if (job.old + i == 0) {
          tokens.push_back({{id, std::numeric_limits<float>::quiet_NaN()}, {}});
        } else {
          tokens.push_back({{id, -0.25F}, {{id, -0.25F}}});
        }
      }
      lock.unlock();
      job.listener->prompt(tokens);
      lock.lock();
    }
    if (job.drawn == job.request.max_tokens) return end(job, engine::FinishReason::length, "", lock);
    const char c = script_[(static_cast<std::size_t>(job.drawn) + job.request.sampling.seed) % script_.size()];
    const auto scripted = c == '$' ? tokenizer_->eos() : static_cast<std::int32_t>(static_cast<unsigned char>(c));
    const auto id = allowed(job, scripted);
    job.text.push_back(id);
    ++job.drawn;
    engine::Token token{.drawn = {id, job.request.logprobs >= 0 ? -0.5F : std::nanf("")},
                        .bytes = tokenizer_->bytes_of(id)};
    for (std::int64_t i = 0; i < job.request.logprobs; ++i) {
      token.alternatives.push_back({i == 0 ? id : static_cast<std::int32_t>('0' + i), -0.5F - static_cast<float>(i)});
    }
    job.reply += token.bytes;
    const bool holds = !job.request.stop.empty();
    if (!holds) token.text = std::string(token.bytes);
    lock.unlock();
    job.listener->token(token);
    lock.lock();
    if (id == tokenizer_->eos()) return end(job, engine::FinishReason::stop, "", lock);
    for (const auto& stop : job.request.stop) {
      if (job.reply.ends_with(stop)) {
        job.reply.resize(job.reply.size() - stop.size());
        return end(job, engine::FinishReason::stop, stop, lock);
      }
    }
    return false;
  }

  bool end(Job& job, engine::FinishReason reason, const std::string& stop, std::unique_lock<std::mutex>& lock) {
    if (job.request.end_turn) {
      auto text = tokenizer_->decode(job.text);  // without an id that ends a text
      text.resize(text.size() - stop.size());
      job.text = tokenizer_->encode(text + *job.request.end_turn);
    }
    engine::Finish finish{.reason = reason, .stop = stop};
    if (job.request.return_state && engine::is_whole(reason)) finish.state = held(std::move(job.text));
    if (!job.request.save_as.empty() && reason != engine::FinishReason::cancelled) {
      sessions_[job.request.save_as] = std::move(job.text);
    }
    if (job.request.disposable) disposable_.push_back(job.request.save_as);
    if (!job.request.stop.empty()) finish.text = job.reply;
    finish.usage = {.prompt_tokens = static_cast<std::int64_t>(job.request.prompt.size()),
                    .cached_tokens = cached,
                    .completion_tokens = job.drawn};
    auto listener = std::move(job.listener);
    job.request.save_as.clear();
    lock.unlock();
    listener->finish(finish);
    listener.reset();  // its end may call the engine
    lock.lock();
    return true;
  }

  std::string script_;
  std::unique_ptr<data::Tokenizer> tokenizer_;
  mutable std::mutex mutex_;
  std::mutex cancel_mutex_;
  std::condition_variable wake_;
  Jobs jobs_;
  std::map<std::string, std::vector<std::int32_t>> sessions_;
  std::vector<std::string> disposable_;  // names of sessions
  std::vector<engine::RequestId> cancels_;
  engine::RequestId id_ = 0;
  std::atomic<int> held_texts_ = 0;
  engine::Request last_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace efla::serve
