// Memorisation of MAD: each key has the same value in every sequence, and no sequence contains the value.
#include "efla/data/permutation.h"
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {
constexpr std::uint64_t kMapSeed = 12345, kMapStream = 0;
}

Task memorisation(const Parameters& parameters) {
  constexpr const char* kName = "memorisation";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 3), length = even(kName, parameters, "length", 2);
  const std::int64_t keys = (vocab - 1) / 2;
  const auto insert = static_cast<std::int32_t>(vocab - 1);
  // Values are [keys, vocab − 1), at least as many as keys; each belongs to at most one key.
  const Permutation value_index(vocab - 1 - keys, kMapSeed, kMapStream);
  Task task;
  task.vocab = vocab;
  task.length = length;
  task.accuracy = Accuracy::classes;
  task.draw = [=](Random& random, Split, Example& example) {
    for (std::int64_t pair = 0; pair < length / 2; ++pair) {
      const auto key = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(keys)));
      example.inputs.insert(example.inputs.end(), {key, insert});
      example.targets.insert(example.targets.end(), {kIgnoreIndex, static_cast<std::int32_t>(keys + value_index(key))});
    }
  };
  task.text = [keys, insert](std::int32_t token) {
    if (token == insert) return std::string("INSERT");
    return (token < keys ? "k" : "v") + std::to_string(token);
  };
  return task;
}

}  // namespace efla::data::synthetic
