#include "efla/engine/schedule.h"

#include <algorithm>
#include <tuple>

namespace efla::engine {

std::uint64_t Schedule::served(const std::string& client) const {
  const auto found = client_served_.find(client);
  return found == client_served_.end() ? 0 : found->second;
}

std::size_t Schedule::next(std::span<const Waiting> waiting, const std::map<std::string, std::int64_t>& running) const {
  const auto key = [&](const Waiting& request) {
    const auto own = running.find(*request.client);
    return std::tuple(own == running.end() ? 0 : own->second, served(*request.client), request.id);
  };
  return static_cast<std::size_t>(std::ranges::min_element(waiting, {}, key) - waiting.begin());
}

// Returns how many ids of prompts the next step takes.
std::int64_t Schedule::step_tokens() const {
  const std::int64_t cut = limits_.cut_tokens, most = limits_.step_tokens;
  const double fit = per_token_.count() == 0 ? 0.0 : limits_.step_time / per_token_;
  const auto tokens = std::max(fit < static_cast<double>(most) ? static_cast<std::int64_t>(fit) : most,
                               std::min(limits_.least_tokens, most));
  return std::max<std::int64_t>(1, tokens / cut) * cut;
}

bool Schedule::is_done(const Prompt& prompt) const {
  return prompt.tokens >= prompt.left || std::ranges::find(prompt.pauses, prompt.tokens) != prompt.pauses.end();
}

// Returns how many ids form the next piece: up to the next place in the text where the prompt may be cut.
std::int64_t Schedule::piece_of(const Prompt& prompt) const {
  const std::int64_t cut = limits_.cut_tokens - (prompt.position + prompt.tokens) % limits_.cut_tokens;
  return std::min(cut, prompt.left - prompt.tokens);
}

void Schedule::distribute(std::vector<Prompt>& prompts) {
  const auto key = [&](const Prompt& prompt) {
    return std::tuple(is_done(prompt), served(*prompt.client), prompt.last_served, prompt.id);
  };
  for (std::int64_t left = step_tokens(); left > 0;) {
    const auto next = std::ranges::min_element(prompts, {}, key);
    if (next == prompts.end() || is_done(*next)) return;
    const std::int64_t tokens = piece_of(*next);
    if (tokens > left) return;
    next->tokens += tokens;
    left -= tokens;
    client_served_[*next->client] = next->last_served = ++served_;
  }
}

// A step of few tokens takes longer per token than a step of many, because both read every weight. So a step that could
// have taken more tokens gives only an upper bound. An upper bound holds at once, because a slow step may be an
// exception, as the first one on a GPU, which loads the kernels.
void Schedule::learn(std::int64_t tokens, std::chrono::duration<double> time) {
  constexpr double kNew = 0.25;
  const auto now = time / static_cast<double>(tokens);
  if (per_token_.count() == 0) {
    per_token_ = now;
  } else if (now > per_token_ && tokens + limits_.cut_tokens > step_tokens()) {
    per_token_ = kNew * now + (1 - kNew) * per_token_;
  } else {
    per_token_ = std::min(per_token_, now);
  }
}

std::int64_t Schedule::most_drafted(std::int64_t texts) const {
  return texts > limits_.most_drafting ? 0 : std::min(limits_.draft_tokens, limits_.most_decoded / texts - 1);
}

void Schedule::forget_clients(const std::function<bool(const std::string&)>& has_request) {
  constexpr std::size_t kRemembered = 1024;
  if (client_served_.size() <= kRemembered) return;
  std::erase_if(client_served_, [&](const auto& client) { return !has_request(client.first); });
}

}  // namespace efla::engine
