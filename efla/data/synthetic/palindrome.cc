// Palindrome: Kimi Team, "Kimi Linear: an expressive, efficient attention architecture", 2025 (arXiv 2510.26692),
// section 5.1.
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

// s₁ … s_n SEP s_n … s₂. The target at each token of the second half is the next token; s_n is given, because no token
// of the second half precedes it.
Task palindrome(const Parameters& parameters) {
  constexpr const char* kName = "palindrome";
  const std::int64_t symbols = whole(kName, parameters, "symbols", 2), half = even(kName, parameters, "length", 4) / 2;
  const auto separator = static_cast<std::int32_t>(symbols);
  Task task;
  task.vocab = symbols + 1;
  task.length = 2 * half;
  task.draw = [=](Random& random, Split, Example& example) {
    std::vector<std::int32_t> symbol(static_cast<std::size_t>(half));
    for (auto& s : symbol) s = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(symbols)));
    example.inputs.insert(example.inputs.end(), symbol.begin(), symbol.end());
    example.inputs.push_back(separator);
    example.inputs.insert(example.inputs.end(), symbol.rbegin(), symbol.rend() - 1);
    example.targets.insert(example.targets.end(), symbol.size() + 1, kIgnoreIndex);
    example.targets.insert(example.targets.end(), symbol.rbegin() + 1, symbol.rend());
  };
  task.text = [separator](std::int32_t token) { return token == separator ? "SEP" : std::to_string(token); };
  return task;
}

}  // namespace efla::data::synthetic
