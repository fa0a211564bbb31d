// The engine's schedule: who gets a slot, and what a step computes.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "efla/serve/local_engine.h"

namespace efla::serve {

// Gives free slots to requests: of the client with the fewest running requests, among equals of the client served
// longest ago. A request that needs two slots waits for both, and later requests wait with it.
void LocalEngine::admit() {
  while (!free_slots_.empty()) {
    std::map<std::string, std::int64_t> running;
    for (const auto& job : running_) ++running[job->request.client];
    Jobs::iterator chosen;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return;
      const auto key = [&](const Job& job) {
        const auto served = client_served_.find(job.request.client);
        return std::tuple(running[job.request.client], served == client_served_.end() ? 0 : served->second, job.id);
      };
      chosen = std::min_element(waiting_.begin(), waiting_.end(),
                                [&](const auto& a, const auto& b) { return key(*a) < key(*b); });
      if (std::cmp_less(free_slots_.size(), slots_of((*chosen)->request))) return;
      running_.splice(running_.end(), waiting_, chosen);
    }
    Job& job = **chosen;
    const auto take_slot = [&] {
      const auto slot = free_slots_.back();
      free_slots_.pop_back();
      return slot;
    };
    job.slot = take_slot();
    if (slots_of(job.request) == 2) job.kept_slot = take_slot();
    try {
      begin(job);
    } catch (const std::exception& error) {
      job.fail(error);
    }
    if (job.ended) close(job);
    if (job.ended) end(chosen);
  }
}

// Returns how many ids from `begin` on form a piece: up to the next multiple of nn::kCutTokens in the text.
std::int64_t LocalEngine::piece_of(const Job& job, std::int64_t begin) const {
  const std::int64_t before = job.state_tokens() - static_cast<std::int64_t>(job.ids_fed);
  const std::int64_t cut = nn::kCutTokens - (before + begin) % nn::kCutTokens;
  return std::min(cut, static_cast<std::int64_t>(job.prefill_end()) - begin);
}

// Returns how many ids of prompts the next step takes.
std::int64_t LocalEngine::prompt_tokens() const {
  if (per_token_.count() == 0) return nn::kCutTokens;
  const auto fit = std::min(static_cast<double>(options_.step_tokens), options_.step_time / per_token_);
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(fit) / nn::kCutTokens) * nn::kCutTokens;
}

// Distributes the ids of prompts that the step takes among the requests, in pieces.
void LocalEngine::distribute_prompts(Step& step) {
  struct Prompt {
    Job* job;
    std::int64_t tokens;
  };
  std::vector<Prompt> prompts;
  for (const auto& job : running_) {
    if (!job->decodes() && !job->replays()) prompts.push_back({job.get(), 0});
  }
  const auto done = [](const Prompt& prompt) {
    const auto& job = *prompt.job;
    const std::size_t end = job.ids_fed + static_cast<std::size_t>(prompt.tokens);
    // The cache copies states at the end of a step, so a prompt stops where the cache wants its state.
    const auto stored = [&](std::size_t n) { return n * nn::kCutTokens == end; };
    return end >= job.prefill_end() ||
           (prompt.tokens > 0 && std::any_of(job.store_after.begin(), job.store_after.end(), stored));
  };
  for (std::int64_t left = prompt_tokens(); left > 0;) {
    const auto key = [&](const Prompt& prompt) {
      const auto& job = *prompt.job;
      return std::tuple(done(prompt), client_served_[job.request.client], job.last_served, job.id);
    };
    const auto next =
        std::min_element(prompts.begin(), prompts.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
    if (next == prompts.end() || done(*next)) break;
    const std::int64_t tokens = piece_of(*next->job, static_cast<std::int64_t>(next->job->ids_fed) + next->tokens);
    if (tokens > left) break;
    next->tokens += tokens;
    left -= tokens;
    client_served_[next->job->request.client] = next->job->last_served = ++served_;
  }
  for (const auto& [job, tokens] : prompts) {
    if (tokens == 0) continue;
    const auto first = static_cast<std::int64_t>(step.ids.size());
    step.runs.push_back({job->slot, job->state_tokens(), tokens, false});
    step.jobs.push_back(job);
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::size_t index = job->ids_fed + static_cast<std::size_t>(i);
      step.ids.push_back(job->ids()[index]);
      if (const auto scored = job->echoed(index)) step.rows.push_back({job, first + i, scored});
    }
    if (job->draws() && job->ids_fed + static_cast<std::size_t>(tokens) == job->prefill_size()) {
      step.rows.push_back({job, first + tokens - 1, std::nullopt});
    }
  }
}

// Decodes a token of every reply and of every rewind that computes a reply again. Drafts only for few replies: then
// most time of a step is reading the weights, once for all rows. A GPU takes no drafts. Where the GPU has begun to
// decode texts, no other text is decoded with them.
void LocalEngine::decode_replies(Step& step) {
  std::vector<std::pair<Job*, std::span<const std::int32_t>>> replies;
  const bool begun = std::ranges::any_of(running_, [](const auto& job) { return job->begun; });
  for (const auto& job : running_) {
    const bool decodes = job->decodes() || job->replays();
    if (decodes && (job->begun || !begun)) replies.emplace_back(job.get(), std::span<const std::int32_t>());
  }
  if (replies.empty()) return;
  const auto count = static_cast<std::int64_t>(replies.size());
  const std::int64_t most_replies = options_.weights == "float32" ? 4 : 1;
  const std::int64_t most =
      model_->on_gpu() || count > most_replies ? 0 : std::min(options_.draft_tokens, nn::kMostDecoded / count - 1);
  for (auto& [job, draft] : replies) draft = job->draft(most);
  std::stable_partition(replies.begin(), replies.end(), [](const auto& reply) { return reply.second.empty(); });
  for (const auto& [job, draft] : replies) {
    step.runs.push_back({job->slot, job->state_tokens(), static_cast<std::int64_t>(draft.size()) + 1, true});
    step.jobs.push_back(job);
    if (!draft.empty()) step.drafts.push_back(step.jobs.size() - 1);
    if (job->draws()) step.rows.push_back({job, static_cast<std::int64_t>(step.ids.size()), std::nullopt});
    step.ids.push_back(job->next_id());
    for (const auto id : draft) {
      step.rows.push_back({job, static_cast<std::int64_t>(step.ids.size()), std::nullopt, true});
      step.ids.push_back(id);
    }
  }
}

LocalEngine::Step LocalEngine::plan() {
  Step step;
  decode_replies(step);
  distribute_prompts(step);
  return step;
}

// Removes the times of clients without a request, so that the map stays bounded.
void LocalEngine::forget_clients() {
  constexpr std::size_t kRemembered = 1024;
  if (client_served_.size() <= kRemembered) return;
  std::erase_if(client_served_, [&](const auto& client) {
    return std::none_of(running_.begin(), running_.end(),
                        [&](const auto& job) { return job->request.client == client.first; });
  });
}

}  // namespace efla::serve
