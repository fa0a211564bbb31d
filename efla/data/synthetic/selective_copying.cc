// Selective copying of MAD: tokens with blanks between them must be repeated without the blanks.
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

Task selective_copying(const Parameters& parameters) {
  constexpr const char* kName = "selective-copying";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 3), length = whole(kName, parameters, "length", 4),
                     copied = whole(kName, parameters, "copied", 1);
  require_at_most(kName, "copied", 2 * copied + 2, length, "2 copied + 2 <= length");
  const auto copy = static_cast<std::int32_t>(vocab - 1), blank = static_cast<std::int32_t>(vocab - 2);
  Task task;
  task.vocab = vocab;
  task.length = length;
  task.accuracy = Accuracy::classes;
  task.draw = [=](Random& random, Split, Example& example) {
    const auto count = static_cast<std::uint32_t>(copied);
    // Each blank is placed before one of the tokens, so that none follows the last token.
    std::vector<std::int64_t> blanks_before(count, 0);
    for (std::int64_t i = 0; i < length - 2 * copied - 1; ++i) ++blanks_before[random.below(count)];
    example.targets.insert(example.targets.end(), static_cast<std::size_t>(length - copied), kIgnoreIndex);
    for (const auto blanks : blanks_before) {
      const auto token = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(blank)));
      example.inputs.insert(example.inputs.end(), static_cast<std::size_t>(blanks), blank);
      example.inputs.push_back(token);
      example.targets.push_back(token);
    }
    example.inputs.push_back(copy);
    example.inputs.insert(example.inputs.end(), count, blank);
  };
  task.text = [copy, blank](std::int32_t token) {
    return token == copy ? "COPY" : token == blank ? "_" : std::to_string(token);
  };
  return task;
}

}  // namespace efla::data::synthetic
