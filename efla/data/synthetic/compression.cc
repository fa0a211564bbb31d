// Compression of MAD: all tokens are reconstructed from the output at the last token, which ends the sequence.
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {

Task compression(const Parameters& parameters) {
  constexpr const char* kName = "compression";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 2), length = whole(kName, parameters, "length", 2);
  const auto end = static_cast<std::int32_t>(vocab - 1);
  Task task;
  task.vocab = vocab;
  task.length = length;
  task.reconstructs = true;
  task.accuracy = Accuracy::classes;
  task.draw = [length, end](Random& random, Split, Example& example) {
    for (std::int64_t t = 0; t + 1 < length; ++t) {
      example.inputs.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(end))));
    }
    example.inputs.push_back(end);
    example.targets.insert(example.targets.end(), example.inputs.end() - length, example.inputs.end());
  };
  task.text = [end](std::int32_t token) { return token == end ? "END" : std::to_string(token); };
  return task;
}

}  // namespace efla::data::synthetic
