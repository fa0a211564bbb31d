// Drafts the next tokens of a text from its repetitions (Saxena, "Prompt lookup decoding", 2023).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace efla::engine {

// The drafts of one reply, one after the other.
class PromptLookup {
 public:
  // Drafts at most `most` tokens to follow the text, which is `prompt` and then `reply`: finds the latest earlier place
  // of the text's last three ids, and returns the ids that follow there. Returns fewer tokens after a draft that was
  // wrong in part, and nothing for some calls after a draft that was wrong from its first token on.
  std::span<const std::int32_t> draft(std::span<const std::int32_t> prompt, std::span<const std::int32_t> reply,
                                      std::int64_t most);
  // Puts another draft in place of the one that draft returned.
  void replace(std::vector<std::int32_t> draft) { draft_ = std::move(draft); }
  // Returns the last draft.
  std::span<const std::int32_t> tokens() const { return draft_; }
  // Drops the last tokens of the draft.
  void cut(std::size_t tokens) { draft_.resize(tokens); }
  // Learns how many tokens of the draft the reply drew before another one.
  void end(std::size_t right);

 private:
  std::vector<std::int32_t> draft_;
  std::int64_t limit_ = 3, pause_ = 0, next_pause_ = 1;
};

}  // namespace efla::engine
