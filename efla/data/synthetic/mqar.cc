// Multi-query associative recall: Arora et al., "Zoology: measuring and improving recall in efficient language models",
// 2023.
#include <algorithm>
#include <cmath>
#include <utility>

#include "efla/base/error.h"
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {

constexpr double kPower = 0.01;  // a of p_i ∝ a·i^(a − 1): most queries come soon after the pairs

struct Mqar {
  std::int64_t vocab, length, pairs, slots;
};

// Draws `count` different numbers of [first, first + range), in random order.
std::vector<std::int32_t> draw_distinct(Random& random, std::int64_t first, std::int64_t range, std::int64_t count) {
  // Floyd's sampling (Bentley and Floyd, "A sample of brilliance", 1987), then a shuffle.
  std::vector<std::int32_t> drawn;
  for (std::int64_t j = range - count; j < range; ++j) {
    auto candidate = static_cast<std::int32_t>(first + random.below(static_cast<std::uint32_t>(j + 1)));
    if (std::find(drawn.begin(), drawn.end(), candidate) != drawn.end()) {
      candidate = static_cast<std::int32_t>(first + j);
    }
    drawn.push_back(candidate);
  }
  for (std::size_t i = drawn.size(); i > 1; --i) {
    std::swap(drawn[i - 1], drawn[random.below(static_cast<std::uint32_t>(i))]);
  }
  return drawn;
}

// Draws slots i = 1, 2, … without replacement with probability ∝ w = i^(a − 1): takes the slots with the largest
// log(u)/w, in this order, for uniform u (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
std::vector<std::int64_t> draw_slots(Random& random, const Mqar& mqar) {
  std::vector<std::pair<double, std::int64_t>> order;
  for (std::int64_t i = 0; i < mqar.slots; ++i) {
    order.emplace_back(std::log1p(-random.uniform()) * std::pow(static_cast<double>(i + 1), 1.0 - kPower), i);
  }
  std::partial_sort(order.begin(), order.begin() + mqar.pairs, order.end(), std::greater<>());
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < mqar.pairs; ++i) slots.push_back(order[i].second);
  return slots;
}

void draw(const Mqar& mqar, Random& random, Example& example) {
  const std::int64_t half = mqar.vocab / 2;
  const auto keys = draw_distinct(random, 1, half - 1, mqar.pairs);
  const auto values = draw_distinct(random, half, mqar.vocab - half, mqar.pairs);
  std::vector<std::int32_t> inputs(static_cast<std::size_t>(mqar.length), 0),
      targets(static_cast<std::size_t>(mqar.length), kIgnoreIndex);
  const auto slots = draw_slots(random, mqar);
  for (std::int64_t i = 0; i < mqar.pairs; ++i) {
    inputs[2 * i] = keys[i];
    inputs[2 * i + 1] = values[i];
    const std::int64_t query = 2 * mqar.pairs + 2 * slots[i];
    inputs[query] = keys[i];
    targets[query] = values[i];
  }
  for (auto& token : inputs) {
    if (token == 0) token = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(mqar.vocab)));
  }
  example.inputs.insert(example.inputs.end(), inputs.begin(), inputs.end());
  example.targets.insert(example.targets.end(), targets.begin(), targets.end());
}

// Sizes in the standard training set, relative to its longest examples: 5 of 9 examples have a quarter of the length, 1
// of 9 has each other size.
struct SetPart {
  std::int64_t length, pairs, share;
};

std::vector<SetPart> standard_parts(std::int64_t longest) {
  return {{longest / 4, longest / 64, 5},
          {longest / 2, longest / 32, 1},
          {longest, longest / 16, 1},
          {longest, longest / 8, 1},
          {longest, longest / 4, 1}};
}

std::string key_or_value(std::int64_t vocab, std::int32_t token) {
  return (token < vocab / 2 ? "k" : "v") + std::to_string(token);
}

}  // namespace

Task mqar(const Parameters& parameters) {
  constexpr const char* kName = "mqar";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 4), length = whole(kName, parameters, "length", 4),
                     pairs = whole(kName, parameters, "pairs", 1);
  require_at_most(kName, "pairs", 4 * pairs, length, "4 pairs <= length");
  require_at_most(kName, "vocab", pairs, vocab / 2 - 1, "pairs <= vocab / 2 - 1 keys");
  const Mqar sizes{vocab, length, pairs, (length - 2 * pairs) / 2};
  Task task;
  task.vocab = vocab;
  task.length = length;
  task.draw = [sizes](Random& random, Split, Example& example) { draw(sizes, random, example); };
  task.text = [vocab](std::int32_t token) { return key_or_value(vocab, token); };
  return task;
}

Task mqar_set(const Parameters& parameters) {
  constexpr const char* kName = "mqar-set";
  const std::int64_t vocab = whole(kName, parameters, "vocab", 4), length = whole(kName, parameters, "length", 64);
  if (length % 64 != 0) throw Error(kName, "length", std::to_string(length), "a multiple of 64");
  require_at_most(kName, "vocab", length / 4, vocab / 2 - 1, "length / 4 pairs <= vocab / 2 - 1 keys");
  std::vector<Mqar> ninths;
  for (const auto& part : standard_parts(length)) {
    ninths.insert(ninths.end(), static_cast<std::size_t>(part.share),
                  Mqar{vocab, part.length, part.pairs, (part.length - 2 * part.pairs) / 2});
  }
  Task task;
  task.vocab = vocab;
  task.length = length;
  task.draw = [ninths](Random& random, Split, Example& example) {
    draw(ninths[random.below(static_cast<std::uint32_t>(ninths.size()))], random, example);
  };
  task.text = [vocab](std::int32_t token) { return key_or_value(vocab, token); };
  return task;
}

}  // namespace efla::data::synthetic
