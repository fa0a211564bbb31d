// The word problem of the symmetric groups S₃ and S₅: Merrill et al., "The illusion of state in state-space models",
// 2024. S₅ is not solvable, so a fixed number of layers whose transitions do not depend on the input cannot solve it.
#include <algorithm>
#include <memory>
#include <numeric>

#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {

using Images = std::vector<int>;  // images of 0, 1, …

struct Group {
  std::vector<Images> elements;                    // in lexicographic order: the tokens
  std::vector<std::vector<std::int32_t>> product;  // [a][b]: first a, then b
};

Group symmetric_group(int n) {
  Group group;
  Images p(static_cast<std::size_t>(n));
  std::iota(p.begin(), p.end(), 0);
  do {
    group.elements.push_back(p);
  } while (std::next_permutation(p.begin(), p.end()));
  for (const auto& a : group.elements) {
    auto& row = group.product.emplace_back();
    for (const auto& b : group.elements) {
      Images both;
      for (const int image : a) both.push_back(b[image]);
      const auto at = std::lower_bound(group.elements.begin(), group.elements.end(), both);
      row.push_back(static_cast<std::int32_t>(at - group.elements.begin()));
    }
  }
  return group;
}

// Elements of the group; the answer at each is the product of the elements so far: p_t ∘ … ∘ p₁.
Task composition(const char* name, int n, const Parameters& parameters) {
  const std::int64_t length = whole(name, parameters, "length", 1);
  const auto group = std::make_shared<const Group>(symmetric_group(n));
  Task task;
  task.vocab = static_cast<std::int64_t>(group->elements.size());
  task.length = length;
  task.draw = [length, group](Random& random, Split, Example& example) {
    const auto order = static_cast<std::uint32_t>(group->elements.size());
    std::int32_t product = 0;  // the identity
    for (std::int64_t t = 0; t < length; ++t) {
      const auto factor = static_cast<std::int32_t>(random.below(order));
      product = group->product[product][factor];
      example.inputs.push_back(factor);
      example.targets.push_back(product);
    }
  };
  task.text = [group](std::int32_t token) {
    std::string images;
    for (const int image : group->elements[token]) images += std::to_string(image + 1);
    return images;
  };
  return task;
}

}  // namespace

Task permutations_of_3(const Parameters& parameters) { return composition("s3", 3, parameters); }
Task permutations_of_5(const Parameters& parameters) { return composition("s5", 5, parameters); }

}  // namespace efla::data::synthetic
