// The engine's requests, from their checks to their ends.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/check.h"
#include "efla/engine/local_engine.h"

namespace efla::engine {

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

}  // namespace efla::engine
