#include "efla/engine/reply.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "efla/base/utf8.h"
#include "efla/engine/session_record.h"

namespace efla::engine {
namespace {

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

}  // namespace

SessionRecord extended(SessionRecord record, std::span<const std::int32_t> ids, const data::Tokenizer& tokenizer) {
  for (const auto id : ids) {
    record.seen[static_cast<std::size_t>(id) / 8] |= static_cast<std::uint8_t>(1U << (id % 8));
    remember(record.last_ids, tokenizer, id);
  }
  return record;
}

Reply::Reply(RequestId id, Request given, std::vector<std::shared_ptr<Listener>> listeners,
             std::shared_ptr<const StoredText> from, const std::optional<Replay>& replay,
             const data::Tokenizer& tokenizer, std::int64_t vocab_size)
    : id(id),
      request(std::move(given)),
      listeners_(std::move(listeners)),
      from_(std::move(from)),
      replay_(replay),
      tokenizer_(tokenizer),
      prompt_tokens_(request.prompt.size()),
      ids_(std::exchange(request.prompt, {})),
      seen_(vocab_size),
      last_ids_(from_ ? from_->record.last_ids : std::vector<std::int32_t>()),
      constraint_(request.constraint ? request.constraint->clone() : nullptr),
      text_(tokenizer, request.stop, from_ && ids_.empty() ? from_->record.held : std::string(), remembered(ids_)) {
  for (const auto& [special, text] : tokenizer.special_texts()) {
    const bool is_stop = std::find(request.stop.begin(), request.stop.end(), text) != request.stop.end();
    if (is_stop) request.stop_token_ids.push_back(special);
  }
  if (from_) seen_.bits() = from_->record.seen;
  for (const auto prompt_id : ids_) seen_.add(prompt_id);
  const bool whole = replay_ && ids_.empty();  // a rewind of the whole request stores the text before it
  if (from_ && !whole) ids_.insert(ids_.begin(), from_->record.pending.begin(), from_->record.pending.end());
}

std::list<std::unique_ptr<Reply>> Reply::fork(std::shared_ptr<const ForkedPrompt> prompt) {
  std::list<std::unique_ptr<Reply>> others;
  for (std::size_t i = 1; i < listeners_.size(); ++i) {
    Request made = request;
    made.prompt.assign(ids_.end() - static_cast<std::ptrdiff_t>(prompt_tokens_), ids_.end());
    made.sampling.seed += i;
    made.echo = false;
    others.push_back(std::make_unique<Reply>(id, std::move(made), std::vector{listeners_[i]}, from_, std::nullopt,
                                             tokenizer_, 8 * std::ssize(seen_.bits())));
    others.back()->forked_ = prompt;
    others.back()->is_fork_ = true;
    others.back()->submitted = submitted;
  }
  listeners_.resize(1);
  return others;
}

void Reply::begin(std::size_t cached) {
  cached_ = cached;
  ids_fed_ = forked_ ? ids_.size() : cached;
  state_ = draws() && decodes() ? State::decoding : State::prefilling;
}

void Reply::count_prefilled(std::int64_t tokens) {
  ids_fed_ += static_cast<std::size_t>(tokens);
  if (draws() && decodes()) state_ = State::decoding;
}

void Reply::count_decoded(std::int64_t tokens) {
  (replays() ? ids_fed_ : decoded_) += static_cast<std::size_t>(tokens);
}

void Reply::end_if_read() {
  if (ended() || draws() || ids_fed_ < prefill_size()) return;
  flush_echo();
  if (ended()) return;
  if (closed_) {
    state_ = State::ended;
  } else {
    end(FinishReason::length);
  }
}

void Reply::end(FinishReason reason) {
  state_ = State::ended;
  reason_ = reason;
  const bool goes_on = reason == FinishReason::length || reason == FinishReason::interrupted;
  if (reason == FinishReason::stop || (goes_on && !request.to_be_continued)) tail_ = text_.finish();
}

// Appends ids to the last ids of the text. Returns these.
std::span<const std::int32_t> Reply::remembered(std::span<const std::int32_t> ids) {
  for (const auto id : ids) remember(last_ids_, tokenizer_, id);
  return last_ids_;
}

std::size_t Reply::prefill_size() const {
  if (ids_.empty()) return 0;
  if (!draws()) return ids_.size() - 1;
  return prompt_tokens_ == 0 && ids_.size() == 1 ? 0 : ids_.size();
}

std::size_t Reply::prefill_end() const {
  return replay_ && ids_fed_ < replay_->prefilled ? std::min(replay_->prefilled, prefill_size()) : prefill_size();
}

bool Reply::replays() const {
  return replay_ && ids_fed_ >= replay_->prefilled && ids_fed_ < replay_->prefilled + replay_->decoded &&
         ids_fed_ < prefill_size();
}

std::int64_t Reply::state_tokens() const {
  return (from_ ? from_->state_tokens() : 0) + static_cast<std::int64_t>(before_ + ids_fed_ + decoded_);
}

std::int64_t Reply::most_tokens() const {
  constexpr std::int64_t kMostDrawn = std::int64_t{1} << 40;                           // more than any text has
  const std::int64_t end_turn = request.end_turn ? std::ssize(*request.end_turn) : 0;  // at most a token per byte
  return state_tokens() + std::ssize(ids_) + std::min(request.max_tokens, kMostDrawn) + end_turn;
}

std::span<const std::int32_t> Reply::draft(std::int64_t most) {
  drawn_ = 0;
  most = std::min(most, request.max_tokens - static_cast<std::int64_t>(reply_.size()) - 1);
  const auto draft = lookup_.draft(ids_, reply_, most);
  drafting_ = !draft.empty();
  by_head_ = false;
  return draft;
}

std::int64_t Reply::head_drafts(std::int64_t most, double cost) {
  if (replays()) return 0;
  most = std::min(most, request.max_tokens - static_cast<std::int64_t>(reply_.size()) - 1);
  const std::int64_t wanted = head_.next(most, cost);
  return wanted > std::ssize(lookup_.tokens()) ? wanted : 0;
}

std::span<const std::int32_t> Reply::take_draft(std::vector<std::int32_t> draft) {
  lookup_.replace(std::move(draft));
  drafting_ = by_head_ = true;
  return lookup_.tokens();
}

bool Reply::follows_draft() const {
  const auto draft = lookup_.tokens();
  return drawn_ > 0 && drawn_ <= draft.size() && reply_.back() == draft[drawn_ - 1];
}

std::int64_t Reply::end_draft(std::int64_t drafted) {
  drafting_ = false;
  usage_.drafted_tokens += drafted;
  usage_.accepted_tokens += static_cast<std::int64_t>(drawn_) - 1;
  by_head_ ? head_.end(drawn_ - 1, lookup_.tokens().size()) : lookup_.end(drawn_ - 1);
  return static_cast<std::int64_t>(drawn_);
}

std::optional<std::int32_t> Reply::echoed(std::size_t index) const {
  const std::size_t pending = ids_.size() - prompt_tokens_;
  if (!request.echo || closed_ || index + 1 >= ids_.size() || index + 1 < pending) return std::nullopt;
  return ids_[index + 1];
}

void Outcome::fail(const std::exception& failure) noexcept {
  no_memory = dynamic_cast<const std::bad_alloc*>(&failure) != nullptr;
  try {
    error = failure.what();
  } catch (const std::bad_alloc&) {
    error = "no memory";  // short enough to need none
  }
}

Outcome Reply::score(std::span<const float> logits, std::int64_t drawable, std::int32_t scored) const {
  const Scorer scorer(logits, drawable);
  return {scorer.score(scored), scorer.best(std::max<std::int64_t>(0, request.logprobs))};
}

Outcome Reply::draw(std::span<float> logits, std::int64_t drawable) {
  Random random(request.sampling.seed, request.sampling.draws + reply_.size());
  const bool scored = request.logprobs >= 0;
  const std::vector<float> model = scored ? std::vector<float>(logits.begin(), logits.end()) : std::vector<float>();
  const auto own = logits.first(static_cast<std::size_t>(drawable));
  if (constraint_) constraint_->exclude(own);
  const auto drawn = engine::draw(own, request.sampling, seen_, counts_, random);
  return scored ? score(model, drawable, drawn) : Outcome{{drawn, NAN}, {}};
}

Outcome Reply::outcome_of(std::span<float> logits, std::int64_t drawable, std::optional<std::int32_t> scored) noexcept {
  Outcome outcome;
  try {
    outcome = scored ? score(logits, drawable, *scored) : draw(logits, drawable);
  } catch (const std::exception& error) {
    outcome.fail(error);
  }
  return outcome;
}

std::optional<Draw> Reply::plain_draw() const {
  const RequestSampling& sampling = request.sampling;
  if (request.logprobs >= 0 || !sampling.logit_bias.empty() || constraint_ || forks()) return std::nullopt;
  if (sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0) return std::nullopt;
  return Draw{&seen_, sampling.seed, sampling.draws + reply_.size()};
}

// Calls f, which calls the listener. An exception ends the request as an error.
template <class F>
void Reply::call(F&& f) {
  if (has_failed()) return;
  try {
    f();
  } catch (const std::exception& thrown) {
    fail(thrown);
  }
}

void Reply::begin_echo() {
  if (request.echo && ids_.size() == prompt_tokens_) echo_.push_back({{ids_.front(), NAN}, {}});
}

void Reply::take_echo(const Outcome& outcome) {
  if (!outcome.error.empty()) return fail(outcome);
  echo_.push_back({outcome.id, outcome.alternatives});
}

void Reply::flush_echo() {
  if (echo_.empty()) return;
  call([&] { listeners_.front()->prompt(echo_); });
  echo_.clear();
}

void Reply::take(const Outcome& outcome, std::span<const std::int32_t> ends) {
  if (!outcome.error.empty()) return fail(outcome);
  const std::int32_t drawn = outcome.id.id;
  if (!last_token) first_token_ms = ms_since(submitted);
  last_token = Clock::now();
  reply_.push_back(drawn);
  ++drawn_;
  seen_.add(drawn);
  ++counts_[drawn];
  remembered(std::span(&drawn, 1));
  const auto has_drawn = [&](const auto& ids) { return std::find(ids.begin(), ids.end(), drawn) != ids.end(); };
  if (has_drawn(ends) || has_drawn(request.stop_token_ids)) {
    end(FinishReason::stop);
    return;
  }
  if (constraint_) constraint_->take(drawn);
  Token token{outcome.id, text_.bytes_of(drawn), text_.push(drawn), outcome.alternatives};
  if (text_.stopped()) {
    end(FinishReason::stop);
  } else if (std::cmp_greater_equal(reply_.size(), request.max_tokens)) {
    end(FinishReason::length);
  } else if (text_.begun() == 0) {
    kept_ = false;
  }
  call([&] { listeners_.front()->token(token); });
}

bool Reply::must_keep_state() const {
  if (ended() || slots_of(request) == 1) return false;
  const std::size_t begun = text_.begun();
  // The string began in this token, unless a state is kept already and what has come of the string is longer than the
  // token.
  return begun > 0 && (!kept_ || begun <= text_.symbols_of(reply_.back()));
}

void Reply::note_kept_state() {
  kept_ = true;
  kept_at_ = reply_.size() - 1;
}

bool Reply::must_close() const {
  return ended() && !closed_ && slot >= 0 && request.stores() && request.end_turn &&
         (reason_ == FinishReason::stop || reason_ == FinishReason::length);
}

// Returns how many ids of the reply come before the stop string or the id that ended it. rest: the text of the next id
// before the stop string.
std::size_t Reply::kept_reply(std::string& rest) const {
  if (!text_.stopped()) return reply_.size() - (reason_ == FinishReason::stop ? 1 : 0);
  using Symbols = ReplyText::Symbols;
  Symbols symbols;  // of the ids from `id` on
  const std::size_t size = text_.stop_symbols().size(), last = text_.symbols_for_stop(reply_.back()).size();
  std::size_t id = reply_.size();
  while (id > 0 && symbols.size() < last + size) symbols.insert(0, text_.symbols_for_stop(reply_[--id]));
  const std::size_t none = symbols.size() - std::min(symbols.size(), last + size - 1);
  const std::size_t stop = symbols.find(text_.stop_symbols(), none);
  if (stop == Symbols::npos) return reply_.size();  // it began in text that the session had held back
  std::size_t begin = 0;
  const auto end_of = [&](std::size_t i) { return begin + text_.symbols_for_stop(reply_[i]).size(); };
  for (; end_of(id) <= stop; ++id) begin = end_of(id);
  rest = tokenizer_.bytes_of(reply_[id]).substr(0, stop - begin);
  if (utf8_prefix(rest) == rest.size()) return id;
  rest.clear();
  return reply_.size();
}

Reply::Before Reply::close() {
  std::string rest;
  const std::size_t kept = ids_.size() + kept_reply(rest);
  const std::vector<std::int32_t> end = tokenizer_.encode(rest + *request.end_turn);
  since_ = ids_;
  since_.insert(since_.end(), reply_.begin(), reply_.end());
  since_.resize(kept);
  since_.insert(since_.end(), end.begin(), end.end());
  prefilled_ = ids_fed_;
  before_ = ids_fed_ + decoded_;
  usage_ = usage();
  auto state = Before::current;
  if (before_ > kept) {
    before_ = ids_.size() + kept_at_;
    state = Before::kept;
    if (!kept_ || before_ > kept) {  // the stop string's first character began in an earlier token
      prefilled_ = before_ = 0;
      state = Before::from;
    }
  }
  ids_.assign(since_.begin() + static_cast<std::ptrdiff_t>(before_), since_.end());
  ids_fed_ = decoded_ = 0;
  store_after.clear();
  closed_ = true;
  if (ids_fed_ < prefill_size()) state_ = State::closing;
  return state;
}

Usage Reply::usage() const {
  Usage all = usage_;
  if (closed_) return all;
  all.prompt_tokens = is_fork_ ? 0 : static_cast<std::int64_t>(prompt_tokens_);
  all.cached_tokens = static_cast<std::int64_t>(cached_);
  all.completion_tokens = std::ssize(reply_);
  all.prefilled_tokens = is_fork_ ? 0 : static_cast<std::int64_t>(ids_fed_ - cached_);
  all.decoded_tokens = static_cast<std::int64_t>(decoded_);
  return all;
}

void Reply::fail(const Outcome& outcome) {
  state_ = State::ended;
  reason_ = FinishReason::error;
  error_ = outcome.error;
  no_memory_ = outcome.no_memory;
}

void Reply::fail(const std::exception& failure) noexcept {
  Outcome outcome;
  outcome.fail(failure);
  state_ = State::ended;
  reason_ = FinishReason::error;
  error_ = std::move(outcome.error);
  no_memory_ = outcome.no_memory;
}

void Reply::finish(std::size_t state_bytes, const HeldText& state) {
  from_.reset();  // because the listener may delete the session and expect its file to be gone
  const auto call_finish = [&](Listener& listener, bool first) {
    Finish result;
    result.reason = reason_;
    result.text = tail_;
    if (text_.stopped()) result.stop = text_.stop();
    if (reason_ == FinishReason::stop && !text_.stopped()) result.stop_id = reply_.back();
    result.error = error_;
    result.no_memory = no_memory_;
    if (first) result.usage = usage();
    if (!has_failed()) result.state = state;
    result.state_bytes = state_bytes;
    result.queue_ms = queue_ms;
    result.first_token_ms = first_token_ms;
    result.total_ms = ms_since(submitted);
    listener.finish(result);
  };
  for (const auto& listener : listeners_) {
    try {
      call_finish(*listener, listener == listeners_.front());
    } catch (const std::exception&) {  // the request has ended anyway
    }
  }
}

std::size_t Reply::record_bytes() const {
  const std::size_t record = sizeof(StoredText) + seen_.bits().size();
  return can_be_rewound() ? 2 * record + ids_.size() * sizeof(ids_[0]) : record;
}

std::shared_ptr<StoredText> Reply::stored(std::shared_ptr<StoredState> state) const {
  if (replay_ && ids_.empty()) return std::make_shared<StoredText>(*from_);
  auto text = std::make_shared<StoredText>();
  text->state = std::move(state);
  SessionRecord before;
  before.seen.resize(seen_.bits().size());
  if (from_) before = from_->record;
  auto since = since_;
  auto& record = text->record;
  if (closed_) {
    record = extended(before, std::span(since).subspan(before.pending.size()), tokenizer_);
    record.held.clear();
    record.pending.clear();
    if (!ids_.empty()) record.pending = {ids_.back()};
  } else {
    since = ids_;
    since.insert(since.end(), reply_.begin(), reply_.end());
    record.pending = reply_.empty()
                         ? std::vector<std::int64_t>(ids_.begin() + static_cast<std::ptrdiff_t>(ids_fed_), ids_.end())
                         : std::vector<std::int64_t>{reply_.back()};
    record.held = text_.held();
    record.last_ids = last_ids_;
    record.seen = seen_.bits();
  }
  const std::uint64_t drawn = replay_ ? replay_->drawn : closed_ ? 0 : request.sampling.draws + reply_.size();
  record.counters = {request.sampling.seed, drawn, static_cast<std::uint64_t>(state_tokens())};
  if (!can_be_rewound()) return text;
  auto start = std::make_shared<StoredText>();
  if (from_) start->state = from_->state;
  start->record = std::move(before);
  text->before = std::move(start);
  since.shrink_to_fit();
  text->since = std::make_shared<StoredIds>(std::move(since));
  text->prefilled = replay_ ? std::min(replay_->prefilled, ids_fed_) : closed_ ? prefilled_ : ids_fed_;
  text->decoded = replay_   ? std::min(replay_->decoded, ids_fed_ - text->prefilled)
                  : closed_ ? before_ - prefilled_
                            : decoded_;
  return text;
}

}  // namespace efla::engine
