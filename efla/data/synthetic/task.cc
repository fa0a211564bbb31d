#include "efla/data/synthetic/task.h"

#include <algorithm>
#include <cmath>

#include "efla/base/error.h"
#include "efla/data/synthetic/tasks.h"

namespace efla::data::synthetic {
namespace {

constexpr std::int64_t kLargest = std::int64_t{1} << 24;

// Returns a number as text: 12, or 0.25 if it is not an integer.
std::string number_text(double value) {
  if (std::abs(value) < 1e15 && value == std::floor(value)) return std::to_string(static_cast<std::int64_t>(value));
  return std::to_string(value);
}

template <class Kinds>
std::string names_of(const Kinds& kinds) {
  std::string names;
  for (const auto& kind : kinds) names += (names.empty() ? "" : ", ") + std::string(kind.name);
  return names;
}

}  // namespace

std::int64_t whole(const char* task, const Parameters& parameters, const char* name, std::int64_t least) {
  const double value = parameters.at(name);
  if (!(value >= static_cast<double>(least) && value <= static_cast<double>(kLargest) && value == std::floor(value))) {
    throw Error(task, name, number_text(value),
                "a whole number from " + std::to_string(least) + " to " + std::to_string(kLargest));
  }
  return static_cast<std::int64_t>(value);
}

std::int64_t even(const char* task, const Parameters& parameters, const char* name, std::int64_t least) {
  const std::int64_t value = whole(task, parameters, name, least);
  if (value % 2 != 0) throw Error(task, name, std::to_string(value), "an even number");
  return value;
}

void require_at_most(const char* task, const char* parameter, std::int64_t left, std::int64_t right,
                     const std::string& inequality) {
  if (left <= right) return;
  throw Error(task, parameter, std::to_string(left) + " > " + std::to_string(right), inequality);
}

const std::vector<TaskKind>& task_kinds() {
  static const ParameterKind kLength64{"length", 64, "tokens of the sequence"};
  static const ParameterKind kLength128{"length", 128, "tokens of the sequence"};
  static const ParameterKind kVocab16{"vocab", 16, "vocabulary size"};
  static const std::vector<TaskKind> kinds{
      {"in-context-recall",
       "MAD: the value that followed the same key before",
       {kVocab16, kLength128},
       in_context_recall},
      {"noisy-recall",
       "MAD: in-context recall with noise between the pairs",
       {{"vocab", 32, "vocabulary size, 16 tokens of it noise"}, kLength128, {"noise", 0.2, "fraction of the slots"}},
       noisy_recall},
      {"fuzzy-recall", "MAD: keys and values of up to three tokens", {kVocab16, kLength128}, fuzzy_recall},
      {"memorisation",
       "MAD: the value of a key, which is the same in every sequence",
       {{"vocab", 256, "vocabulary size"}, {"length", 32, "tokens of the sequence"}},
       memorisation},
      {"compression",
       "MAD: reconstruct all tokens from the last position's output",
       {kVocab16, {"length", 32, "tokens of the sequence"}},
       compression},
      {"selective-copying",
       "MAD: repeat the tokens between the blanks, in order",
       {kVocab16, {"length", 256, "tokens of the sequence"}, {"copied", 16, "tokens to copy"}},
       selective_copying},
      {"mqar",
       "multi-query associative recall: the values of many keys",
       {{"vocab", 8192, "vocabulary size"}, kLength64, {"pairs", 4, "keys with their values"}},
       mqar},
      {"mqar-set",
       "the standard training set of mqar: examples of five sizes, five of nine of them short",
       {{"vocab", 8192, "vocabulary size"}, {"length", 256, "tokens of the longest examples, a multiple of 64"}},
       mqar_set},
      {"palindrome",
       "a sequence, then the same sequence backwards",
       {{"symbols", 64, "different symbols"}, {"length", 64, "tokens of the sequence, even"}},
       palindrome},
      {"stack",
       "many stacks: the element that a POP returns",
       {{"vocab", 130, "vocabulary size: PUSH, POP, a name per stack, and elements"},
        kLength64,
        {"stacks", 64, "independent stacks"}},
       stack},
      {"parity", "whether the number of ones so far is odd", {kLength64}, parity},
      {"modular-counting",
       "the number of ones so far, modulo a number",
       {kLength64, {"modulus", 5, "the modulus"}},
       modular_counting},
      {"s3", "the product so far of permutations of three", {kLength64}, permutations_of_3},
      {"s5", "the product so far of permutations of five", {kLength64}, permutations_of_5},
  };
  return kinds;
}

Task make_task(std::string_view name, const Parameters& parameters) {
  const auto& kinds = task_kinds();
  const auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const TaskKind& k) { return k.name == name; });
  if (kind == kinds.end()) {
    throw Error("synthetic task", "name", "'" + std::string(name) + "'", "one of " + names_of(kinds));
  }
  Parameters all;
  for (const auto& parameter : kind->parameters) all.emplace(parameter.name, parameter.standard);
  for (const auto& [key, value] : parameters) {
    const auto found = all.find(key);
    if (found == all.end()) {
      throw Error(std::string(name), key, number_text(value), "a parameter: " + names_of(kind->parameters));
    }
    found->second = value;
  }
  Task task = kind->make(all);
  task.name = name;
  task.parameters = std::move(all);
  return task;
}

void draw_example(const Task& task, std::uint64_t seed, Split split, std::int64_t i, Example& example) {
  Random random(seed, 2 * static_cast<std::uint64_t>(i) + (split == Split::test ? 1 : 0));
  for (auto* tokens : {&example.inputs, &example.targets}) {
    tokens->clear();
    tokens->reserve(static_cast<std::size_t>(task.length));
  }
  task.draw(random, split, example);
}

Example example(const Task& task, std::uint64_t seed, Split split, std::int64_t i) {
  Example result;
  draw_example(task, seed, split, i, result);
  return result;
}

}  // namespace efla::data::synthetic
