// Fuzzy in-context recall of MAD: keys and values are motifs of up to three tokens.
#include <algorithm>
#include <map>
#include <set>

#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {

constexpr std::int64_t kLongestMotif = 3;  // tokens of a motif

using Motif = std::vector<std::int32_t>;

struct Fuzzy {
  std::int64_t keys, values;  // number of key tokens, then of value tokens; the pad token comes last
  std::int64_t length;
};

// Draws `size` different tokens of [first, first + count).
Motif draw_motif(Random& random, std::int64_t first, std::int64_t count, std::int64_t size) {
  Motif motif;
  while (static_cast<std::int64_t>(motif.size()) < size) {
    const auto token = static_cast<std::int32_t>(first + random.below(static_cast<std::uint32_t>(count)));
    if (std::find(motif.begin(), motif.end(), token) == motif.end()) motif.push_back(token);
  }
  return motif;
}

class Drawing {
 public:
  Drawing(const Fuzzy& fuzzy, Random& random, Split split) : fuzzy_(fuzzy), random_(random), split_(split) {}

  void draw(Example& example) {
    const Motif key = draw_key(), value = draw_value();
    const auto pair = static_cast<std::int64_t>(key.size() + value.size());
    values_.emplace(key, value);
    const std::int64_t end = fuzzy_.length - pair - 2 * kLongestMotif;
    // The last pair is the probe: it repeats `key`, which occurs for the first time soon after `place` at the latest.
    // MAD draws the place below length − 2 pair. With a short pair that may leave no room for the first occurrence.
    // Here such a place becomes the last place with enough room.
    const auto place = std::min<std::int64_t>(random_.below(static_cast<std::uint32_t>(fuzzy_.length - 2 * pair)),
                                              end - 2 * kLongestMotif);
    while (size() < end) {
      const bool probe = size() >= place && !seen_.contains(key);
      const Motif drawn = probe ? key : draw_key();
      if (!values_.contains(drawn)) values_.emplace(drawn, draw_value());
      add(drawn);
    }
    add(key);
    finish(example);
  }

 private:
  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }

  Motif draw_key() {
    const bool any = split_ == Split::train;  // in the test all keys have the greatest length
    const std::int64_t size = any ? 1 + random_.below(kLongestMotif) : kLongestMotif;
    return draw_motif(random_, 0, fuzzy_.keys, size);
  }
  Motif draw_value() { return draw_motif(random_, fuzzy_.keys, fuzzy_.values, 1 + random_.below(kLongestMotif)); }

  void add(const Motif& key) {
    const Motif& value = values_.at(key);
    const bool asked = !seen_.insert(key).second;
    tokens_.insert(tokens_.end(), key.begin(), key.end());
    answers_.insert(answers_.end(), key.size(), kIgnoreIndex);
    for (const auto token : value) {
      tokens_.push_back(token);
      answers_.push_back(asked ? token : kIgnoreIndex);
    }
  }

  void finish(Example& example) {
    const auto pad = static_cast<std::int32_t>(fuzzy_.keys + fuzzy_.values);
    const auto padding = static_cast<std::size_t>(fuzzy_.length + 1 - size());
    tokens_.insert(tokens_.begin(), padding, pad);
    answers_.insert(answers_.begin(), padding, kIgnoreIndex);
    const auto& targets = split_ == Split::train ? tokens_ : answers_;
    example.inputs.insert(example.inputs.end(), tokens_.begin(), tokens_.end() - 1);
    example.targets.insert(example.targets.end(), targets.begin() + 1, targets.end());
  }

  const Fuzzy& fuzzy_;
  Random& random_;
  Split split_;
  std::map<Motif, Motif> values_;
  std::set<Motif> seen_;
  Motif tokens_, answers_;
};

}  // namespace

Task fuzzy_recall(const Parameters& parameters) {
  constexpr const char* kName = "fuzzy-recall";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 2), length = whole(kName, parameters, "length", 1);
  const std::int64_t motifs = vocab - 1;
  require_at_most(kName, "vocab", kLongestMotif, motifs / 2, "tokens of the longest motif <= (vocab - 1) / 2");
  // The first occurrence of the key, the probe, and a pair by which the loop of draw may overrun its end.
  require_at_most(kName, "length", 6 * kLongestMotif + 1, length, "three pairs of the longest motifs + 1 <= length");
  const Fuzzy fuzzy{motifs / 2, motifs - motifs / 2, length};
  Task task;
  task.vocab = vocab;
  task.length = length;
  task.accuracy = Accuracy::classes;
  task.draw = [fuzzy](Random& random, Split split, Example& example) { Drawing(fuzzy, random, split).draw(example); };
  task.text = [fuzzy, motifs](std::int32_t token) {
    if (token == motifs) return std::string("pad");
    return (token < fuzzy.keys ? "k" : "v") + std::to_string(token);
  };
  return task;
}

}  // namespace efla::data::synthetic
