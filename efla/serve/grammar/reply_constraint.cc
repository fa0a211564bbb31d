#include "efla/serve/grammar/reply_constraint.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace efla::serve {
namespace {

using Reasoning = ReplyRule::Reasoning;

constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>", kBlanks = " \t\n\r";
constexpr std::chrono::milliseconds kMostTime{2000}, kTokenTime{10};  // of a reply and per token: others wait
constexpr const char* kForcedEnd = "\n</think>";                      // as models write it

// Returns the number of bytes at the end of a text that a tag may begin with.
std::size_t begun_bytes(std::string_view text, std::string_view tag) {
  for (auto size = std::min(text.size(), tag.size() - 1); size > 0; --size) {
    if (text.ends_with(tag.substr(0, size))) return size;
  }
  return 0;
}

std::string_view without_blanks(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  return text;
}

// Returns whether a token may follow a beginning of a tag.
bool may_belong(std::string_view token, std::string_view tag) {
  for (std::size_t at = 0; at < tag.size(); ++at) {
    const auto rest = tag.substr(at);
    if (rest.starts_with(token) || token.starts_with(rest)) return true;
  }
  return false;
}

// Returns whether a token, behind some beginning of a tag, may complete the tag and continue.
bool may_continue(std::string_view token, std::string_view tag) {
  for (std::size_t at = 1; at < tag.size(); ++at) {
    if (token.starts_with(tag.substr(at)) && token.size() > tag.size() - at) return true;
  }
  const auto whole = token.find(tag);
  return whole != std::string_view::npos && whole + tag.size() < token.size();
}

class ReplyConstraint final : public engine::Constraint {
 public:
  ReplyConstraint(std::shared_ptr<const ReasoningTokens> tokens, std::shared_ptr<const ReplyRule> rule)
      : reasoning_tokens_(std::move(tokens)),
        rule_(std::move(rule)),
        place_(rule_->reasoning == Reasoning::none    ? Place::text
               : rule_->reasoning == Reasoning::begun ? Place::reasoning
                                                      : Place::start) {
    start_text();
  }
  ReplyConstraint(const ReplyConstraint& other)
      : reasoning_tokens_(other.reasoning_tokens_),
        rule_(other.rule_),
        place_(other.place_),
        state_(other.state_ ? other.state_->clone() : nullptr),
        text_(other.text_),
        tokens_(other.tokens_),
        forced_(other.forced_),
        taken_(other.taken_),
        time_(other.time_) {}

  std::unique_ptr<Constraint> clone() const override { return std::make_unique<ReplyConstraint>(*this); }

  void exclude(std::span<float> logits) override {
    timed([&] {
      switch (place_) {
        case Place::start:
          return exclude_at_start(logits);
        case Place::reasoning:
          return exclude_in_reasoning(logits);
        case Place::text:
          if (state_) state_->exclude(logits);
      }
    });
  }

  void take(std::int32_t id) override {
    ++taken_;
    timed([&] {
      switch (place_) {
        case Place::start:
          return take_at_start(id);
        case Place::reasoning:
          return take_in_reasoning(id);
        case Place::text:
          if (state_) require_allowed(state_->take(id));
      }
    });
  }

 private:
  enum class Place {
    start,      // the reply may be the beginning of <think>
    reasoning,  // in it
    text,       // behind it
  };

  // Calls f. Throws std::runtime_error where the reply has taken too long so far.
  template <class F>
  void timed(const F& f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    time_ += std::chrono::steady_clock::now() - begin;
    if (time_ > kMostTime + taken_ * kTokenTime) throw std::runtime_error("the grammar takes too long to follow");
  }

  std::string_view bytes_of(std::int32_t id) const { return reasoning_tokens_->tokenizer.bytes_of(id); }
  void start_text() { state_ = rule_->grammar ? rule_->grammar->start(rule_->ends) : nullptr; }
  static void require_allowed(bool allowed) {
    if (!allowed) throw std::runtime_error("the grammar does not allow a token of the reply");
  }

  // Returns whether the text so far, followed by a token, may begin a reply with <think>.
  bool may_open(std::string_view bytes) const {
    const std::string text = text_ + std::string(bytes);
    const auto rest = without_blanks(text);
    return rest.starts_with(kThink) || kThink.starts_with(rest);
  }

  // Allows what the grammar allows, and what continues <think>.
  void exclude_at_start(std::span<float> logits) {
    if (!rule_->grammar) return;
    std::vector<std::pair<std::size_t, float>> opening;
    for (const auto id : reasoning_tokens_->opening) {
      const auto i = static_cast<std::size_t>(id);
      if (may_open(bytes_of(id))) opening.emplace_back(i, logits[i]);
    }
    if (state_) {
      state_->exclude(logits);
    } else {
      std::ranges::fill(logits, -INFINITY);
    }
    for (const auto& [i, logit] : opening) logits[i] = logit;
  }

  void take_at_start(std::int32_t id) {
    const bool opens = may_open(bytes_of(id));
    text_ += bytes_of(id);
    if (state_ && !state_->take(id)) state_.reset();  // the reply is no text without reasoning
    if (!opens) {
      require_allowed(state_ || !rule_->grammar);
      text_.clear();
      place_ = Place::text;
    } else if (const auto at = text_.find(kThink); at != std::string::npos) {
      place_ = Place::reasoning;
      start_text();
      add_reasoning(std::exchange(text_, {}).substr(at + kThink.size()));
    }
  }

  // Before a text that follows a grammar the reply may not end.
  void exclude_in_reasoning(std::span<float> logits) {
    if (is_forced()) {
      const auto id = static_cast<std::size_t>(reasoning_tokens_->forced_end[static_cast<std::size_t>(forced_)]);
      const float logit = logits[id] > -INFINITY ? logits[id] : 0.0F;
      std::ranges::fill(logits, -INFINITY);
      logits[id] = logit;
      return;
    }
    if (!state_) return;
    for (const auto id : rule_->ends) logits[static_cast<std::size_t>(id)] = -INFINITY;
    exclude_wrong_ends(logits);
  }

  bool is_forced() const {
    return rule_->max_reasoning_tokens && tokens_ >= *rule_->max_reasoning_tokens &&
           forced_ < std::ssize(reasoning_tokens_->forced_end);
  }

  // Excludes tokens that complete </think> and continue with what the grammar does not allow.
  void exclude_wrong_ends(std::span<float> logits) {
    for (const auto id : reasoning_tokens_->closing) {
      const auto text = text_ + std::string(bytes_of(id));
      const auto end = text.find(kThinkEnd);
      if (end == std::string::npos || end + kThinkEnd.size() == text.size()) continue;
      if (!state_->clone()->take(text.substr(end + kThinkEnd.size()))) logits[static_cast<std::size_t>(id)] = -INFINITY;
    }
  }

  void take_in_reasoning(std::int32_t id) {
    const bool forced = is_forced();
    ++(forced ? forced_ : tokens_);
    add_reasoning(bytes_of(id));
    if (forced && !is_forced()) place_ = Place::text;  // also where a tokenizer's </think> has no bytes
  }

  // Adds to the reasoning, which may end there.
  void add_reasoning(std::string_view bytes) {
    text_ += bytes;
    const auto end = text_.find(kThinkEnd);
    if (end == std::string::npos) {
      text_.erase(0, text_.size() - begun_bytes(text_, kThinkEnd));
      return;
    }
    const auto rest = text_.substr(end + kThinkEnd.size());
    text_.clear();
    place_ = Place::text;
    if (state_ && !rest.empty()) require_allowed(state_->take(rest));
  }

  std::shared_ptr<const ReasoningTokens> reasoning_tokens_;
  std::shared_ptr<const ReplyRule> rule_;
  Place place_;
  std::unique_ptr<GrammarState> state_;  // null: no grammar, or the reply has begun <think>
  std::string text_;                     // that a tag may begin with
  std::int64_t tokens_ = 0;              // of the reasoning
  std::int64_t forced_ = 0;              // ids of the forced end so far
  std::int64_t taken_ = 0;               // tokens of the reply
  std::chrono::steady_clock::duration time_{0};
};

}  // namespace

ReasoningTokens::ReasoningTokens(const data::Tokenizer& given)
    : tokenizer(given), forced_end(given.encode_part(kForcedEnd, /*begins=*/false)) {
  for (std::int64_t i = 0; i < given.vocab_size(); ++i) {
    const auto id = static_cast<std::int32_t>(i);
    const auto bytes = given.bytes_of(id), token = without_blanks(bytes);
    if (!token.empty() && may_belong(token, kThink)) opening.push_back(id);
    if (may_continue(bytes, kThinkEnd)) closing.push_back(id);
  }
}

std::shared_ptr<const engine::Constraint> make_constraint(std::shared_ptr<const ReasoningTokens> tokens,
                                                          ReplyRule rule) {
  return std::make_shared<ReplyConstraint>(std::move(tokens), std::make_shared<const ReplyRule>(std::move(rule)));
}

}  // namespace efla::serve
