// Replies that a constraint leaves to chance, over the tokenizer "bytes".
#pragma once

#include <cmath>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "efla/engine/constraint.h"
#include "efla/serve/grammar/grammar.h"

namespace efla::serve::test {

inline constexpr std::int32_t kEnd = 257;  // of the tokenizer "bytes"

inline GrammarCompiler::Result compiled(GrammarCompiler& compiler, GrammarSource source) {
  std::promise<GrammarCompiler::Result> promise;
  compiler.compile(std::move(source), [&](GrammarCompiler::Result result) { promise.set_value(std::move(result)); });
  return promise.get_future().get();
}

// Returns the ids that a constraint leaves.
inline std::set<std::int32_t> allowed(engine::Constraint& constraint) {
  std::vector<float> logits(kEnd + 1, 0.0F);
  constraint.exclude(logits);
  std::set<std::int32_t> ids;
  for (std::int32_t id = 0; id <= kEnd; ++id) {
    if (logits[static_cast<std::size_t>(id)] > -INFINITY) ids.insert(id);
  }
  return ids;
}

// Draws a reply at random; nothing where it does not end in time. Its ends, and the ends of what it has begun, are
// likely.
inline std::optional<std::string> draw(const engine::Constraint& start, std::uint64_t seed) {
  constexpr int kLongest = 2000;
  constexpr std::string_view kClosing = "\"}]<";
  const auto state = start.clone();
  Random random(seed, 0);
  std::string text;
  for (int i = 0; i < kLongest; ++i) {
    const auto ids = allowed(*state);
    if (ids.empty()) return std::nullopt;
    if (ids.contains(kEnd) && (ids.size() == 1 || random.bits() % 4 == 0)) return text;
    std::vector<std::int32_t> drawn, closing;
    for (const auto id : ids) {
      if (id == kEnd) continue;
      drawn.push_back(id);
      if (kClosing.find(static_cast<char>(id)) != std::string_view::npos) closing.push_back(id);
    }
    const auto& from = !closing.empty() && random.bits() % 2 == 0 ? closing : drawn;
    const auto id = from[random.bits() % from.size()];
    text += static_cast<char>(id);
    state->take(id);
  }
  return std::nullopt;
}

}  // namespace efla::serve::test
