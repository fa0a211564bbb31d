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

#include "efla/serve/local_engine.h"

namespace efla::serve {
namespace {

constexpr std::int64_t kLogitRows = 64;  // computed at a time

// Moves the rows that can be drawn together on a GPU behind the others: those that need no logits and have the most
// frequent options of such rows. Returns how many others there are.
template <class Row>
std::size_t move_drawn_together(std::vector<Row>& rows) {
  const auto is_plain = [](const Row& row) { return !row.scored && row.job->plain_draw(); };
  std::map<generate::SamplingOptions, std::int64_t> counts;
  for (const auto& row : rows) {
    if (is_plain(row)) ++counts[row.job->request.sampling];
  }
  if (counts.empty()) return rows.size();
  const generate::SamplingOptions options =
      std::ranges::max_element(counts, {}, [](const auto& count) { return count.second; })->first;
  const auto others = std::ranges::stable_partition(rows, [&](const Row& row) {
    const generate::SamplingOptions& own = row.job->request.sampling;
    return !is_plain(row) || own != options;
  });
  return rows.size() - others.size();
}

}  // namespace

// Ends a request without a reply, or whose reply has ended, when its ids are prefilled.
void LocalEngine::end_if_fed(Job& job) {
  if (job.ended || job.draws() || !job.decodes()) return;
  job.flush_echo();
  if (!job.ended) job.ended = job.reason();
}

// Computes a step, and passes its tokens on to the listeners.
void LocalEngine::compute(const Step& step) {
  const auto start = Clock::now();
  model_->advance(step.ids, step.runs, pool_);
  bool reads = false;  // whether prompts are prefilled
  for (std::size_t i = 0; i < step.runs.size(); ++i) {
    if (step.runs[i].decode) {
      if (step.runs[i].tokens == 1) step.jobs[i]->count_decoded(1);
    } else {
      reads = true;
      step.jobs[i]->ids_fed += static_cast<std::size_t>(step.runs[i].tokens);
    }
  }
  if (reads) time_step(static_cast<std::int64_t>(step.ids.size()), Clock::now() - start);
  cache_states(step);
  auto sorted = step.rows;
  const std::size_t with_logits = model_->on_gpu() ? move_drawn_together(sorted) : sorted.size();
  const std::span<const Row> rows = sorted;
  for (std::size_t begin = 0; begin < with_logits; begin += kLogitRows) {
    take_logits(rows.subspan(begin, std::min<std::size_t>(kLogitRows, with_logits - begin)));
  }
  const bool ahead = with_logits == 0 && may_begin_next(step);
  draw_on_gpu(rows.subspan(with_logits), ahead);
  for (Job* job : step.jobs) job->begun = ahead;
  end_drafts(step);
  for (Job* job : step.jobs) {
    if (job->ended) continue;
    job->flush_echo();
    end_if_fed(*job);
  }
}

// Returns whether the GPU may begin to decode the tokens of a step before the engine has them: each text draws a token,
// no other text may decode in the next step, and a state is of no use once its text has ended.
bool LocalEngine::may_begin_next(const Step& step) const {
  const auto is_decoded = [](const nn::TextRun& run) { return run.decode; };
  const auto is_dropped = [](const Job* job) { return job->request.save_as.empty(); };
  return step.rows.size() == step.runs.size() && std::ranges::all_of(step.runs, is_decoded) &&
         running_.size() == step.jobs.size() && std::ranges::all_of(step.jobs, is_dropped) &&
         !std::ranges::all_of(step.jobs, &Job::draws_last);
}

void LocalEngine::keep_state(Job& job) {
  model_->copy(job.slot, job.kept_slot);
  job.note_kept_state();
}

// Advances the texts of drafts by the accepted tokens of each draft.
void LocalEngine::end_drafts(const Step& step) {
  for (std::size_t i = 0; i < step.drafts.size(); ++i) {
    Job& job = *step.jobs[step.drafts[i]];
    if (job.ended == FinishReason::error) continue;
    const std::int64_t drawn = job.end_draft();
    job.count_decoded(drawn);
    model_->accept(i, drawn, pool_);
    if (job.must_keep_state()) keep_state(job);
    const std::lock_guard lock(mutex_);
    statistics_.drafted_tokens += static_cast<std::uint64_t>(step.runs[step.drafts[i]].tokens - 1);
    statistics_.accepted_tokens += static_cast<std::uint64_t>(drawn - 1);
  }
}

// Learns from a step how long a token of a prompt takes. A step of few tokens takes longer per token than a step of
// many, because both read every weight. So a step of few tokens gives only an upper bound.
void LocalEngine::time_step(std::int64_t tokens, std::chrono::duration<double> time) {
  constexpr double kNew = 0.25;
  const auto now = time / static_cast<double>(tokens);
  if (per_token_.count() == 0) {
    per_token_ = now;
  } else if (tokens >= nn::kCutTokens) {
    per_token_ = kNew * now + (1 - kNew) * per_token_;
  } else {
    per_token_ = std::min(per_token_, now);
  }
}

void LocalEngine::take_logits(std::span<const Row> rows) {
  std::vector<std::int64_t> numbers;
  for (const auto& row : rows) numbers.push_back(row.row);
  std::vector<Outcome> outcomes(rows.size());
  const View<float, 2> logits = model_->logits(numbers, pool_);
  const auto vocab = static_cast<std::size_t>(info_.vocab_size);
  pool_.run(std::ssize(rows), [&](std::int64_t i, int) {
    const auto& row = rows[static_cast<std::size_t>(i)];
    if (row.drafted) return;
    const std::span<float> own(logits.at(i), vocab);
    outcomes[static_cast<std::size_t>(i)] = row.job->outcome_of(own, drawable_, row.scored);
  });
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Job& job = *rows[i].job;
    if (job.ended) continue;
    if (rows[i].scored) {
      job.take_echo(outcomes[i]);
      continue;
    }
    if (rows[i].drafted) {
      if (!job.follows_draft()) continue;
      outcomes[i] = job.outcome_of({logits.at(static_cast<std::int64_t>(i)), vocab}, drawable_, std::nullopt);
    }
    take(job, outcomes[i]);
  }
}

// Draws the next tokens of rows that move_drawn_together has chosen. With `ahead` the GPU begins to decode them.
void LocalEngine::draw_on_gpu(std::span<const Row> rows, bool ahead) {
  if (rows.empty()) return;
  std::vector<std::int64_t> numbers;
  std::vector<generate::Draw> draws;
  for (const auto& row : rows) {
    numbers.push_back(row.row);
    draws.push_back(*row.job->plain_draw());
  }
  const auto drawn = model_->draw(numbers, draws, rows.front().job->request.sampling, drawable_, ahead);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].job->ended) continue;
    Outcome outcome{{drawn[i].id, NAN}, {}};
    if (!std::isfinite(drawn[i].largest)) {
      outcome.error = "generate: the largest logit of a text is " + std::to_string(drawn[i].largest);
    }
    take(*rows[i].job, outcome);
  }
}

// Passes a drawn token on to a request.
void LocalEngine::take(Job& job, const Outcome& outcome) {
  job.flush_echo();
  const auto before = job.last_token;
  job.take(outcome, info_.ends);
  if (!outcome.error.empty()) return;
  if (job.must_keep_state()) job.drafting() ? job.cut_draft() : keep_state(job);
  const std::lock_guard lock(mutex_);
  if (!before) {
    statistics_.first_token_seconds.add(job.first_token_ms / 1e3);
  } else {
    statistics_.between_tokens_seconds.add(std::chrono::duration<double>(*job.last_token - *before).count());
  }
}

void LocalEngine::cache_states(const Step& step) {
  for (Job* job : step.jobs) {
    for (const std::size_t beginning : job->store_after) {
      if (beginning * nn::kCutTokens != job->ids_fed) continue;
      cache_.put(job->beginnings[beginning - 1], job->ids_fed, std::make_shared<const State>(model_->state(job->slot)));
    }
  }
}

}  // namespace efla::serve
