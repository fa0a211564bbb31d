// In-context recall: Poli et al., "Mechanistic design and scaling of hybrid architectures", 2024 (MAD).
#include <algorithm>

#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

// Draws slots of two tokens: noise, or a key and its value, which is drawn when the key occurs for the first time. The
// last slot repeats a key. In training every next token is a target; in the test only the values of repeated keys are.
void draw_recall(const Recall& recall, Random& random, Split split, Example& example) {
  const auto keys = static_cast<std::uint32_t>(recall.keys), values = static_cast<std::uint32_t>(recall.values);
  std::vector<std::int32_t> tokens, answers;  // an answer is the token itself if a model can know it
  std::vector<std::int32_t> value_of(keys, kIgnoreIndex), seen;
  const auto add_pair = [&](std::int32_t key) {
    std::int32_t& value = value_of[key];
    const bool known = value != kIgnoreIndex;
    if (!known) {
      value = static_cast<std::int32_t>(keys + random.below(values));
      seen.push_back(key);
    }
    tokens.insert(tokens.end(), {key, value});
    answers.insert(answers.end(), {kIgnoreIndex, known ? value : kIgnoreIndex});
  };
  // One slot before the last is always a pair, because the probe needs a key.
  const std::int64_t slots = recall.slots - 1, certain = random.below(static_cast<std::uint32_t>(slots));
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    if (slot != certain && recall.noise > 0.0 && random.uniform() < recall.noise) {
      for (int i = 0; i < 2; ++i) {
        const auto noise = random.below(static_cast<std::uint32_t>(recall.noise_tokens));
        tokens.push_back(static_cast<std::int32_t>(keys + values + noise));
        answers.push_back(kIgnoreIndex);
      }
    } else {
      add_pair(static_cast<std::int32_t>(random.below(keys)));
    }
  }
  add_pair(seen[random.below(static_cast<std::uint32_t>(seen.size()))]);
  const auto& targets = split == Split::train ? tokens : answers;
  example.inputs.insert(example.inputs.end(), tokens.begin(), tokens.end() - 1);
  example.targets.insert(example.targets.end(), targets.begin() + 1, targets.end());
}

Task in_context_recall(const Parameters& parameters) {
  constexpr const char* kName = "in-context-recall";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 2), length = even(kName, parameters, "length", 4);
  const Recall recall{vocab / 2, vocab - vocab / 2, 0, length / 2, 0.0};
  Task task;
  task.vocab = vocab;
  task.length = 2 * recall.slots - 1;
  task.accuracy = Accuracy::classes;
  task.draw = [recall](Random& random, Split split, Example& example) { draw_recall(recall, random, split, example); };
  task.text = [recall](std::int32_t token) { return (token < recall.keys ? "k" : "v") + std::to_string(token); };
  return task;
}

}  // namespace efla::data::synthetic
