// Stack: Kimi Team, "Kimi Linear: an expressive, efficient attention architecture", 2025 (arXiv 2510.26692), section
// 5.1.
#include <algorithm>

#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {

struct Sizes {
  std::int64_t vocab, length, stacks;
};
constexpr std::int32_t kPush = 0, kPop = 1, kFirstStack = 2;  // elements follow the stacks

// Draws operations: PUSH stack element, or POP stack element, with equal probability unless all stacks are empty. A POP
// takes an element from a stack that is not empty; the target at the stack's name is that element. The end of the
// sequence may cut the last operation.
void draw(const Sizes& sizes, Random& random, Example& example) {
  const auto first_element = static_cast<std::int32_t>(kFirstStack + sizes.stacks);
  const auto elements = static_cast<std::uint32_t>(sizes.vocab - first_element);
  std::vector<std::vector<std::int32_t>> content(static_cast<std::size_t>(sizes.stacks));
  std::vector<std::int32_t> filled;  // stacks that are not empty, in any order
  const std::size_t begin = example.inputs.size(), end = begin + static_cast<std::size_t>(sizes.length);
  while (example.inputs.size() < end) {
    const bool pop = !filled.empty() && random.below(2) == 1;
    std::int32_t stack = 0, element = 0;
    if (pop) {
      auto& chosen = filled[random.below(static_cast<std::uint32_t>(filled.size()))];
      stack = chosen;
      element = content[stack].back();
      content[stack].pop_back();
      if (content[stack].empty()) {
        chosen = filled.back();
        filled.pop_back();
      }
    } else {
      stack = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(sizes.stacks)));
      element = first_element + static_cast<std::int32_t>(random.below(elements));
      if (content[stack].empty()) filled.push_back(stack);
      content[stack].push_back(element);
    }
    example.inputs.insert(example.inputs.end(), {pop ? kPop : kPush, kFirstStack + stack, element});
    example.targets.insert(example.targets.end(), {kIgnoreIndex, pop ? element : kIgnoreIndex, kIgnoreIndex});
  }
  example.inputs.resize(end);
  example.targets.resize(end);
}

}  // namespace

Task stack(const Parameters& parameters) {
  constexpr const char* kName = "stack";
  const Sizes sizes{whole(kName, parameters, "vocab", 1), whole(kName, parameters, "length", 6),
                    whole(kName, parameters, "stacks", 1)};
  require_at_most(kName, "stacks", kFirstStack + sizes.stacks + 2, sizes.vocab,
                  "PUSH + POP + stacks + two elements <= vocab");
  Task task;
  task.vocab = sizes.vocab;
  task.length = sizes.length;
  task.draw = [sizes](Random& random, Split, Example& example) { draw(sizes, random, example); };
  task.text = [sizes](std::int32_t token) {
    if (token < kFirstStack) return std::string(token == kPush ? "PUSH" : "POP");
    token -= kFirstStack;
    return token < sizes.stacks ? "#" + std::to_string(token) : std::to_string(token - sizes.stacks);
  };
  return task;
}

}  // namespace efla::data::synthetic
