// Synthetic tasks: sequences drawn from a seed, and what a model is to answer at which of their tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/random.h"
#include "efla/data/images.h"

namespace efla::data::synthetic {

// The target of a token at which nothing is asked.
inline constexpr std::int32_t kNoTarget = -100;

struct Example {
  std::vector<std::int32_t> inputs;   // [T], in [0, vocab)
  std::vector<std::int32_t> targets;  // [T], in [0, vocab) or kNoTarget
};

using Parameters = std::map<std::string, double, std::less<>>;

// What of the right answers is counted.
//
//   classes   per batch, the mean over the classes that are asked for of the share that is right (MAD)
//   examples  the mean over examples of the share of its targets that is right (MQAR and all others)
enum class Accuracy { classes, examples };

struct Task {
  std::string name;
  Parameters parameters;      // all of them
  std::int64_t vocab = 0;     // tokens, of inputs and targets
  std::int64_t length = 0;    // T of every example; of the longest in mqar-set
  bool reconstructs = false;  // every token is to be told from the vector at the last
  Accuracy accuracy = Accuracy::examples;
  // Appends T tokens, at most the length, to each of the two. What is drawn depends on the generator and the split
  // alone.
  std::function<void(Random&, Split, Example&)> draw;
  std::function<std::string(std::int32_t)> text;  // of a token, for people
};

// Example i of a split: the same wherever and in whatever order it is asked for. The splits share no random numbers.
Example example(const Task& task, std::uint64_t seed, Split split, std::int64_t i);

struct ParameterKind {
  std::string_view name;
  double standard;
  std::string_view help;
};

struct TaskKind {
  std::string_view name;
  std::string_view summary;
  std::vector<ParameterKind> parameters;
  Task (*make)(const Parameters&);  // of all parameters
};

// Every task, in the order in which they are shown.
const std::vector<TaskKind>& task_kinds();

// The task of that name with these parameters, the standard ones where it has no others. Throws Error for an unknown
// name or parameter and, with the inequality that fails, for sizes that the task cannot hold.
Task make_task(std::string_view name, const Parameters& parameters = {});

}  // namespace efla::data::synthetic
