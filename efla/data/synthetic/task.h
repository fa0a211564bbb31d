// Synthetic tasks: sequences drawn from a seed, and the answers that a model must give at some of their tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "efla/base/ignore_index.h"
#include "efla/base/random.h"
#include "efla/data/images.h"

namespace efla::data::synthetic {

struct Example {
  std::vector<std::int32_t> inputs;   // [T], in [0, vocab)
  std::vector<std::int32_t> targets;  // [T], in [0, vocab) or kIgnoreIndex
};

using Parameters = std::map<std::string, double, std::less<>>;

// How the accuracy is averaged.
//
//   classes   per batch, the mean over the target classes of the fraction of correct answers (MAD)
//   examples  the mean over examples of the fraction of correct answers (MQAR and all others)
enum class Accuracy { classes, examples };

struct Task {
  std::string name;
  Parameters parameters;      // all of them
  std::int64_t vocab = 0;     // number of tokens, of inputs and targets
  std::int64_t length = 0;    // T of every example; in mqar-set T of the longest
  bool reconstructs = false;  // whether every token is predicted from the output at the last token
  Accuracy accuracy = Accuracy::examples;
  // Appends T tokens, at most the length, to inputs and targets. The result depends only on the generator and the
  // split.
  std::function<void(Random&, Split, Example&)> draw;
  std::function<std::string(std::int32_t)> text;  // of a token, for display
};

// Draws example i of a split into `example`, whose memory it reuses. The example does not depend on earlier calls. The
// splits share no random numbers.
void draw_example(const Task& task, std::uint64_t seed, Split split, std::int64_t i, Example& example);

// Returns example i of a split, as draw_example draws it.
Example example(const Task& task, std::uint64_t seed, Split split, std::int64_t i);

struct ParameterKind {
  std::string_view name;
  double standard;  // of a parameter that takes whole numbers alone, a whole number
  std::string_view help;
};

struct TaskKind {
  std::string_view name;
  std::string_view summary;
  std::vector<ParameterKind> parameters;
  Task (*make)(const Parameters&);  // gets all parameters
};

// Returns every task, in display order.
const std::vector<TaskKind>& task_kinds();

// Returns the task of that name with these parameters; standard values replace those that are not given. Throws Error
// for an unknown name or parameter and, with the violated inequality, for sizes that the task cannot hold.
Task make_task(std::string_view name, const Parameters& parameters = {});

}  // namespace efla::data::synthetic
