// The engine's memory of texts that run: slots, pages, and what their sessions will take.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "efla/base/check.h"
#include "efla/base/memory.h"
#include "efla/engine/local_engine.h"

namespace efla::engine {
namespace {

constexpr std::int64_t kMostSlots = 1 << 16;

// Returns what stands for the full pages that a text begins with, as far as it is known before it begins.
std::vector<const void*> first_pages(const Reply& reply, const TextMemory& memory) {
  std::vector<const void*> pages;
  const auto add = [&](const auto& all, std::int64_t tokens) {
    for (const auto& page : all) pages.push_back(page.get());
    pages.resize(std::min(pages.size(), static_cast<std::size_t>(memory.full_pages(tokens))));
  };
  if (reply.forked() != nullptr) {
    add(reply.forked()->state.pages, reply.forked()->state.tokens);
  } else if (reply.from() && reply.from()->state) {
    add(reply.from()->state->pages(), reply.from()->state_tokens());
  }
  return pages;
}

// Throws Error where a GPU has less memory than the states and the weights.
void require_gpu_memory(std::size_t states, const EngineModel& model) {
  const double memory = model.memory_bytes(), left = std::max(memory - double(model.weight_bytes()), 0.0);
  Require("engine")(double(states) <= left, "state_memory", states,
                    "at most " + std::to_string(static_cast<std::size_t>(left)) + " bytes, what a GPU of " +
                        std::to_string(static_cast<std::size_t>(memory)) + " bytes has beside the weights");
}

}  // namespace

Room room_of(const EngineOptions& options, const EngineModel& model) {
  const TextMemory text = model.text_memory();
  const Require require("engine");
  require(options.state_memory >= text.bytes(1), "state_memory", options.state_memory,
          "at least the " + std::to_string(text.bytes(1)) + " bytes of one text's state");
  const bool grows = text.page > 0, bounded = options.state_memory != kNoBound;
  const auto most = static_cast<std::size_t>(std::min(options.max_texts, kMostSlots));
  const std::size_t constants = options.state_memory / (grows ? 2 : 1);
  std::size_t slots = text.constant == 0 ? most : std::clamp<std::size_t>(constants / text.constant, 1, most);
  if (grows) slots = std::clamp<std::size_t>((options.state_memory - slots * text.constant) / text.page, 1, slots);
  const std::size_t states = bounded ? options.state_memory : slots * text.constant;
  const std::size_t sessions = options.session_memory == kNoBound ? 0 : options.session_memory;
  const bool in_process = model.capabilities().in_process;
  if (!in_process) require_gpu_memory(states, model);
  std::pair largest{in_process ? states : 0, "state_memory"};
  const double all = double(largest.first) + double(sessions) + double(options.cache_memory) +
                     (in_process ? double(model.weight_bytes()) : 0.0);
  if (sessions > largest.first) largest = {sessions, "session_memory"};
  if (options.cache_memory > largest.first) largest = {options.cache_memory, "cache_memory"};
  require_memory("engine", largest.second, "states, sessions, cache and weights", all);
  const std::size_t rest = options.state_memory - slots * text.constant;
  return {static_cast<std::int64_t>(slots), grows ? static_cast<std::int64_t>(rest / text.page) : 0};
}

std::size_t LocalEngine::state_bytes(std::int64_t tokens) const {
  return info_.session_bytes + static_cast<std::size_t>(tokens) * info_.token_bytes;
}

// Returns the most bytes that storing a text will add to the others: its pages before the request are stored already.
std::size_t LocalEngine::most_stored_bytes(const Reply& reply) const {
  const auto layout = model_->layout(reply.most_tokens());
  const auto known = shares_pages_ && reply.from() ? text_memory_.full_pages(reply.from()->state_tokens()) : 0;
  return layout.bytes() - static_cast<std::size_t>(known) * layout.page_bytes + reply.record_bytes();
}

// Returns the pages that a text may fill until its request ends. Where texts share pages, its second slot has only one
// that the first does not have.
std::int64_t LocalEngine::pages_of(const Reply& reply) const {
  const std::int64_t own = text_memory_.pages(reply.most_tokens());
  if (slots_of(reply.request) == 1) return own;
  return shares_pages_ ? own + 1 : 2 * own;
}

// Throws Error for a request whose text never fits.
void LocalEngine::require_pages(const Reply& reply) const {
  Require("request")(pages_of(reply) <= pages_, "state_memory", options_.state_memory,
                     "room for " + std::to_string(reply.most_tokens()) + " tokens, whose keys and values it keeps");
}

// Returns the pages that must be free for a request to begin: those that no running text holds.
std::int64_t LocalEngine::pages_to_begin(const Reply& reply) const {
  const auto is_held = [&](const void* page) { return held_.contains(page); };
  return pages_of(reply) - std::ranges::count_if(first_pages(reply, text_memory_), is_held);
}

// Gives a request its slots and pages.
void LocalEngine::take_memory(Reply& reply) {
  for (auto* slot : {&reply.slot, &reply.kept_slot}) {
    if (slot == &reply.kept_slot && slots_of(reply.request) == 1) continue;
    *slot = free_slots_.back();
    free_slots_.pop_back();
  }
  reply.pages = pages_of(reply);
  free_pages_ -= reply.pages;
  hold_pages(reply, first_pages(reply, text_memory_));
}

// Counts pages among those that running texts share, instead of among the text's own ones.
void LocalEngine::hold_pages(Reply& reply, const std::vector<const void*>& pages) {
  reply.held_pages.reserve(reply.held_pages.size() + pages.size());
  for (const void* page : pages) {
    if (++held_[page] > 1) ++free_pages_;
    --reply.pages;
    reply.held_pages.push_back(page);
  }
}

void LocalEngine::free_memory(Reply& reply) {
  for (const auto slot : {reply.slot, reply.kept_slot}) {
    if (slot < 0) continue;
    model_->drop(slot);
    free_slots_.push_back(slot);
  }
  free_pages_ += reply.pages;
  for (const void* page : reply.held_pages) {
    const auto held = held_.find(page);
    if (--held->second > 0) continue;
    held_.erase(held);
    ++free_pages_;
  }
}

}  // namespace efla::engine
