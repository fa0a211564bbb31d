// What the engine computes in a step.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "efla/engine/local_engine.h"

namespace efla::engine {
namespace {

constexpr std::int64_t kLogitRows = 64;  // computed at a time

// Moves the rows that the model can draw together behind the others: those that need no logits and have the most
// frequent options of such rows. Returns how many others there are.
template <class Row>
std::size_t move_drawn_together(std::vector<Row>& rows) {
  const auto is_plain = [](const Row& row) { return !row.scored && row.reply->plain_draw(); };
  std::map<SamplingOptions, std::int64_t> counts;
  for (const auto& row : rows) {
    if (is_plain(row)) ++counts[row.reply->request.sampling];
  }
  if (counts.empty()) return rows.size();
  const SamplingOptions options =
      std::ranges::max_element(counts, {}, [](const auto& count) { return count.second; })->first;
  const auto others = std::ranges::stable_partition(rows, [&](const Row& row) {
    const SamplingOptions& own = row.reply->request.sampling;
    return !is_plain(row) || own != options;
  });
  return rows.size() - others.size();
}

}  // namespace

LocalEngine::Step LocalEngine::plan() {
  Step step;
  step.start = Clock::now();
  decode_replies(step);
  read_prompts(step);
  return step;
}

// Decodes a token of every reply and of every rewind that computes a reply again. Where the model has begun to decode
// texts, no other text is decoded with them.
void LocalEngine::decode_replies(Step& step) {
  std::vector<std::pair<Reply*, std::span<const std::int32_t>>> replies;
  const bool begun = std::ranges::any_of(running_, [](const auto& reply) { return reply->begun; });
  for (const auto& reply : running_) {
    if (reply->decodes() && (reply->begun || !begun))
      replies.emplace_back(reply.get(), std::span<const std::int32_t>());
  }
  if (replies.empty()) return;
  const std::int64_t most = schedule_.most_drafted(std::ssize(replies));
  const std::int64_t most_by_head = std::min(most, options_.draft_head);
  const double cost = most_by_head == 0 ? 0.0 : draft_cost_.per_token(std::ssize(replies));
  for (auto& [reply, draft] : replies) {
    draft = reply->draft(std::min(most, options_.draft_tokens));
    const std::int64_t wanted = reply->head_drafts(most_by_head, cost);
    if (wanted == 0) continue;
    draft = reply->take_draft(model_->draft(reply->slot, reply->state_tokens(), reply->next_id(), wanted, pool_));
    step.drafted_by_head += wanted;
  }
  std::stable_partition(replies.begin(), replies.end(), [](const auto& pair) { return pair.second.empty(); });
  for (const auto& [reply, draft] : replies) {
    step.runs.push_back({reply->slot, reply->state_tokens(), std::ssize(draft) + 1, true});
    step.replies.push_back(reply);
    if (!draft.empty()) step.drafts.push_back(step.replies.size() - 1);
    if (reply->draws()) step.rows.push_back({reply, std::ssize(step.ids), std::nullopt});
    step.ids.push_back(reply->next_id());
    for (const auto id : draft) {
      step.rows.push_back({reply, std::ssize(step.ids), std::nullopt, true});
      step.ids.push_back(id);
    }
  }
}

// Reads ids of prompts.
void LocalEngine::read_prompts(Step& step) {
  std::vector<Reply*> replies;
  std::vector<Schedule::Prompt> prompts;
  for (const auto& reply : running_) {
    if (reply->decodes()) continue;
    const auto fed = static_cast<std::int64_t>(reply->ids_fed());
    Schedule::Prompt prompt{&reply->request.client,
                            reply->id,
                            reply->last_served,
                            reply->state_tokens(),
                            static_cast<std::int64_t>(reply->prefill_end()) - fed,
                            {}};
    // The cache copies states at the end of a step.
    for (const auto n : reply->store_after) {
      const auto pause = static_cast<std::int64_t>(n) * nn::kCutTokens - fed;
      if (pause > 0) prompt.pauses.push_back(pause);
    }
    replies.push_back(reply.get());
    prompts.push_back(std::move(prompt));
  }
  schedule_.distribute(prompts);
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    const auto tokens = prompts[n].tokens;
    if (tokens == 0) continue;
    Reply* reply = replies[n];
    reply->last_served = prompts[n].last_served;
    const auto first = std::ssize(step.ids);
    step.runs.push_back({reply->slot, reply->state_tokens(), tokens, false});
    step.replies.push_back(reply);
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::size_t index = reply->ids_fed() + static_cast<std::size_t>(i);
      step.ids.push_back(reply->ids()[index]);
      if (const auto scored = reply->echoed(index)) step.rows.push_back({reply, first + i, scored});
    }
    if (reply->draws() && reply->ids_fed() + static_cast<std::size_t>(tokens) == reply->prefill_size()) {
      step.rows.push_back({reply, first + tokens - 1, std::nullopt});
    }
  }
}

// Computes a step, and passes its tokens on to the listeners.
void LocalEngine::compute(const Step& step) {
  const auto start = Clock::now();
  model_->advance(step.ids, step.runs, pool_);
  bool reads = false;  // whether prompts are prefilled
  for (std::size_t i = 0; i < step.runs.size(); ++i) {
    if (step.runs[i].decode) {
      if (step.runs[i].tokens == 1) step.replies[i]->count_decoded(1);
    } else {
      reads = true;
      step.replies[i]->count_prefilled(step.runs[i].tokens);
    }
  }
  if (reads) schedule_.learn(std::ssize(step.ids), Clock::now() - start);
  cache_states(step);
  auto sorted = step.rows;
  const std::size_t with_logits = capabilities_.draws ? move_drawn_together(sorted) : sorted.size();
  const std::span<const Row> rows = sorted;
  for (std::size_t begin = 0; begin < with_logits; begin += kLogitRows) {
    take_logits(rows.subspan(begin, std::min<std::size_t>(kLogitRows, with_logits - begin)));
  }
  const bool ahead = with_logits == 0 && may_begin_next(step);
  draw_by_model(rows.subspan(with_logits), ahead);
  for (Reply* reply : step.replies) reply->begun = ahead;
  end_drafts(step);
  if (!reads) learn_cost(step);
  for (Reply* reply : step.replies) {
    if (reply->ended()) continue;
    reply->flush_echo();
    reply->end_if_read();
  }
}

// Returns whether the model may begin to decode the tokens of a step before the engine has them: each text draws a
// token, no other text may decode in the next step, and a state is of no use once its text has ended.
bool LocalEngine::may_begin_next(const Step& step) const {
  const auto is_decoded = [](const nn::TextRun& run) { return run.decode; };
  const auto is_dropped = [](const Reply* reply) { return !reply->request.stores(); };
  return step.rows.size() == step.runs.size() && std::ranges::all_of(step.runs, is_decoded) &&
         running_.size() == step.replies.size() && std::ranges::all_of(step.replies, is_dropped) &&
         !std::ranges::all_of(step.replies, &Reply::draws_last);
}

// Learns what drafts by the head cost from a step that only decoded, unless it had other drafts.
void LocalEngine::learn_cost(const Step& step) {
  const std::int64_t texts = std::ssize(step.runs);
  if (options_.draft_head == 0 || texts > nn::kMostDecoded) return;
  if (std::ssize(step.ids) != texts + step.drafted_by_head) return;
  draft_cost_.learn(texts, step.drafted_by_head, Clock::now() - step.start);
}

void LocalEngine::keep_state(Reply& reply) {
  model_->copy(reply.slot, reply.kept_slot, reply.state_tokens());
  reply.note_kept_state();
}

// Advances the texts of drafts by the accepted tokens of each draft.
void LocalEngine::end_drafts(const Step& step) {
  for (std::size_t i = 0; i < step.drafts.size(); ++i) {
    Reply& reply = *step.replies[step.drafts[i]];
    if (reply.has_failed()) continue;
    const std::int64_t drafted = step.runs[step.drafts[i]].tokens - 1, drawn = reply.end_draft(drafted);
    reply.count_decoded(drawn);
    model_->accept(i, drawn, pool_);
    if (reply.must_keep_state()) keep_state(reply);
    const std::lock_guard lock(mutex_);
    statistics_.drafted_tokens += static_cast<std::uint64_t>(drafted);
    statistics_.accepted_tokens += static_cast<std::uint64_t>(drawn - 1);
  }
}

// Lets the other replies to a prompt begin when there are slots for them.
void LocalEngine::fork_replies(Reply& reply, std::span<const float> logits) {
  try {
    auto state = model_->state(reply.slot, reply.state_tokens());
    auto others = reply.fork(
        std::make_shared<const ForkedPrompt>(ForkedPrompt{std::move(state), {logits.begin(), logits.end()}}));
    const std::lock_guard lock(mutex_);
    waiting_.splice(waiting_.end(), others);
  } catch (const std::exception& error) {
    reply.fail(error);
  }
}

void LocalEngine::take_logits(std::span<const Row> rows) {
  std::vector<std::int64_t> numbers;
  for (const auto& row : rows) numbers.push_back(row.row);
  std::vector<Outcome> outcomes(rows.size());
  const View<float, 2> logits = model_->logits(numbers, pool_);
  const auto vocab = static_cast<std::size_t>(info_.vocab_size);
  const auto logits_of = [&](std::int64_t i) { return std::span<float>(logits.at(i), vocab); };
  for (std::int64_t i = 0; i < std::ssize(rows); ++i) {  // before draws change the logits
    Reply& reply = *rows[static_cast<std::size_t>(i)].reply;
    if (reply.forks() && !rows[static_cast<std::size_t>(i)].scored) fork_replies(reply, logits_of(i));
  }
  pool_.run(std::ssize(rows), [&](std::int64_t i, int) {
    const auto& row = rows[static_cast<std::size_t>(i)];
    if (row.drafted) return;
    outcomes[static_cast<std::size_t>(i)] = row.reply->outcome_of(logits_of(i), drawable_, row.scored);
  });
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Reply& reply = *rows[i].reply;
    if (reply.ended()) continue;
    if (rows[i].scored) {
      reply.take_echo(outcomes[i]);
      continue;
    }
    if (rows[i].drafted) {
      if (!reply.follows_draft()) continue;
      outcomes[i] = reply.outcome_of(logits_of(static_cast<std::int64_t>(i)), drawable_, std::nullopt);
    }
    take(reply, outcomes[i]);
  }
}

// Draws the next tokens of rows that move_drawn_together has chosen. With `ahead` the model begins to decode
// them.
void LocalEngine::draw_by_model(std::span<const Row> rows, bool ahead) {
  if (rows.empty()) return;
  std::vector<std::int64_t> numbers;
  std::vector<Draw> draws;
  for (const auto& row : rows) {
    numbers.push_back(row.row);
    draws.push_back(*row.reply->plain_draw());
  }
  const auto drawn = model_->draw(numbers, draws, rows.front().reply->request.sampling, drawable_, ahead);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].reply->ended()) continue;
    Outcome outcome{{drawn[i].id, NAN}, {}};
    if (!std::isfinite(drawn[i].largest)) {
      outcome.error = "generate: the largest logit of a text is " + std::to_string(drawn[i].largest);
    }
    take(*rows[i].reply, outcome);
  }
}

// Passes a drawn token on to a request.
void LocalEngine::take(Reply& reply, const Outcome& outcome) {
  reply.flush_echo();
  const auto before = reply.last_token;
  try {
    reply.take(outcome, info_.ends);
  } catch (const std::exception& error) {  // no memory for the token
    reply.fail(error);
  }
  if (reply.has_failed()) return;
  if (reply.must_keep_state()) reply.drafting() ? reply.cut_draft() : keep_state(reply);
  const std::lock_guard lock(mutex_);
  if (!before) {
    statistics_.first_token_seconds.add(reply.first_token_ms / 1e3);
  } else {
    statistics_.between_tokens_seconds.add(std::chrono::duration<double>(*reply.last_token - *before).count());
  }
}

void LocalEngine::cache_states(const Step& step) {
  for (Reply* reply : step.replies) {
    for (const std::size_t beginning : reply->store_after) {
      if (beginning * nn::kCutTokens != reply->ids_fed()) continue;
      try {
        cache_.put(reply->beginnings[beginning - 1], reply->ids_fed(),
                   model_->state(reply->slot, reply->state_tokens()));
      } catch (const std::bad_alloc&) {  // the state is only not cached
      }
    }
  }
}

}  // namespace efla::engine
