#include "efla/engine/prefix_cache.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "efla/io/sha256.h"
#include "efla/nn/inference/inference_model.h"

namespace efla::engine {
namespace {

constexpr std::size_t kMaxSeen = 1 << 18;  // beginnings that are remembered

constexpr std::hash<std::string> hash_of;

}  // namespace

std::vector<std::string> names_of_beginnings(std::span<const std::int32_t> prompt, const std::string& client) {
  constexpr auto kCut = static_cast<std::size_t>(nn::kCutTokens);
  std::vector<std::string> names;
  for (std::size_t end = kCut; end < prompt.size(); end += kCut) {
    io::Sha256 hash;
    hash.update(io::as_bytes(names.empty() ? client : names.back()));
    const auto ids = prompt.subspan(end - kCut, kCut);
    hash.update({reinterpret_cast<const std::uint8_t*>(ids.data()), ids.size_bytes()});
    names.push_back(hash.digest());
  }
  return names;
}

PrefixCache::Plan PrefixCache::plan(const std::vector<std::string>& names, std::vector<std::size_t> wanted) {
  Plan plan;
  if (budget_ == 0 || names.empty()) return plan;
  ++now_;
  std::size_t shared = 0;
  for (std::size_t i = names.size(); i > 0 && !plan.state; --i) {
    if (shared == 0 && seen_.contains(hash_of(names[i - 1]))) shared = i;
    const auto found = entries_.find(names[i - 1]);
    if (found == entries_.end()) continue;
    found->second.hits += 1;
    found->second.last = now_;
    plan.state = found->second.state->get();
    plan.known = i;
  }
  wanted.push_back(shared);
  wanted.push_back(names.size());
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::copy_if(wanted.begin(), wanted.end(), std::back_inserter(plan.store_after),
               [&](std::size_t beginning) { return beginning > plan.known && beginning <= names.size(); });
  for (const auto& name : names) remember(hash_of(name));
  return plan;
}

void PrefixCache::remember(std::size_t hash) {
  if (!seen_.insert(hash).second) return;
  order_.push_back(hash);
  if (order_.size() <= kMaxSeen) return;
  seen_.erase(order_.front());
  order_.pop_front();
}

void PrefixCache::put(const std::string& name, std::size_t tokens, const nn::TextState& state) {
  if (entries_.contains(name)) return;
  Entry entry{std::make_unique<StoredState>(state, pages_), tokens, 0, now_};
  std::size_t size = 0;
  entry.state->for_each_part([&](const auto& part) { size += part.bytes(); });
  if (size > budget_) return;
  entry.state->for_each_part([&](auto& part) { part.count(bytes_); });
  while (bytes_->memory > budget_) {
    const auto worth = [&](const auto& known) {
      return static_cast<double>(known.second.tokens) * static_cast<double>(known.second.hits + 1) /
             static_cast<double>(now_ - known.second.last + 1);
    };
    entries_.erase(std::ranges::min_element(entries_, {}, worth));
  }
  entries_.emplace(name, std::move(entry));
}

}  // namespace efla::engine
