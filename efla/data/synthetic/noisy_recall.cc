// Noisy in-context recall of MAD.
#include "efla/base/error.h"
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {
constexpr std::int64_t kNoiseTokens = 16;
}

Task noisy_recall(const Parameters& parameters) {
  constexpr const char* kName = "noisy-recall";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 2), length = even(kName, parameters, "length", 4);
  require_at_most(kName, "vocab", kNoiseTokens + 2, vocab, "16 tokens of noise + a key + a value <= vocab");
  const double noise = parameters.at("noise");
  if (!(noise >= 0.0 && noise < 1.0)) throw Error(kName, "noise", std::to_string(noise), "0 <= noise < 1");
  const std::int64_t rest = vocab - kNoiseTokens;
  const Recall recall{rest / 2, rest - rest / 2, kNoiseTokens, length / 2, noise};
  Task task;
  task.vocab = vocab;
  task.length = 2 * recall.slots - 1;
  task.accuracy = Accuracy::classes;
  task.draw = [recall](Random& random, Split split, Example& example) { draw_recall(recall, random, split, example); };
  task.text = [recall, rest](std::int32_t token) {
    return (token < recall.keys ? "k" : token < rest ? "v" : "n") + std::to_string(token);
  };
  return task;
}

}  // namespace efla::data::synthetic
