#include "efla/train/tasks/lm_options.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/io/fields.h"

namespace efla::train {
namespace {

using nlohmann::json;

constexpr const char* kTrainLm = "train lm";
constexpr std::int64_t kMost = std::int64_t{1} << 40;  // of steps and tokens

// Calls visit(name, member) for every key of the tables.
template <class Options, class Visit>
void for_each_data_key(Options& o, const Visit& visit) {
  visit("train", o.train);
  visit("validation", o.validation);
  visit("tokenizer", o.tokenizer);
}

template <class Options, class Visit>
void for_each_training_key(Options& o, const Visit& visit) {
  visit("sequence_length", o.sequence_length);
  visit("tokens_per_step", o.tokens_per_step);
  visit("micro_batch", o.micro_batch);
  visit("steps", o.steps);
  visit("tokens", o.tokens);
  visit("lr", o.lr);
  visit("min_lr", o.min_lr);
  visit("warmup_steps", o.warmup_steps);
  visit("weight_decay", o.weight_decay);
  visit("beta1", o.beta1);
  visit("beta2", o.beta2);
  visit("eps", o.eps);
  visit("clip", o.clip);
  visit("seed", o.seed);
  visit("recompute", o.recompute);
  visit("precision", o.precision);
  visit("evaluate_every", o.evaluate_every);
  visit("evaluate_tokens", o.evaluate_tokens);
  visit("sample_every", o.sample_every);
  visit("sample_tokens", o.sample_tokens);
  visit("sample_prompt", o.sample_prompt);
  visit("checkpoint_every", o.checkpoint_every);
  visit("keep_checkpoints", o.keep_checkpoints);
}

// Refuses a key without a table. The message names a table that has the key.
void require_tables(const io::Fields& config) {
  const std::vector<std::string> tables{"model", "data", "training"};
  const json known = to_json(LmOptions{});
  for (const auto& [key, value] : config.content().items()) {
    if (std::find(tables.begin(), tables.end(), key) != tables.end()) continue;
    std::string nearest = nearest_name(key, tables);
    for (const auto& [table, keys] : known.items()) {
      if (keys.contains(key)) nearest = table + "." + key;
    }
    config.refuse(key, "no such field (nearest: " + nearest + ")");
  }
}

template <class ForEach, class Options>
void read_table(const io::Fields& config, const char* name, const ForEach& for_each, Options& options) {
  if (config.find(name) == nullptr) return;
  const auto fields = config.object(name);
  for_each(options, [&](const char* key, auto& member) { fields.read(key, member); });
  fields.refuse_others();
}

void validate_sizes(const LmTrainOptions& o) {
  const Require require(kTrainLm, "training.");
  require(o.sequence_length >= 1 && o.sequence_length <= 1 << 24, "sequence_length", o.sequence_length, "1 to 2^24");
  require(o.micro_batch >= 1 && o.micro_batch <= 65536, "micro_batch", o.micro_batch, "1 to 65536");
  const std::int64_t rows = o.sequence_length * o.micro_batch;
  require(o.tokens_per_step >= rows && o.tokens_per_step <= kMost && o.tokens_per_step % rows == 0, "tokens_per_step",
          o.tokens_per_step, "a multiple of micro_batch x sequence_length = " + std::to_string(rows));
  require(o.steps == 0 || o.tokens == 0, "steps", o.steps,
          "0 or none, because training.tokens is " + std::to_string(o.tokens));
  require(o.steps > 0 || o.tokens > 0, "steps", o.steps, "a number above 0, or training.tokens above 0");
  require(o.steps >= 0 && o.steps <= kMost, "steps", o.steps, "1 to 2^40");
  require(o.tokens >= 0, "tokens", o.tokens, "a number above 0");
}

void validate_rates(const LmTrainOptions& o) {
  const Require require(kTrainLm, "training.");
  require(o.lr > 0.0 && o.lr <= 1.0, "lr", o.lr, "a number above 0 and at most 1");
  require(o.min_lr >= 0.0 && o.min_lr <= o.lr, "min_lr", o.min_lr, "0 to lr = " + value_text(o.lr));
  require(o.warmup_steps >= 0 && o.warmup_steps < o.total_steps(), "warmup_steps", o.warmup_steps,
          "0 or more and below the number of steps, " + std::to_string(o.total_steps()));
  require(o.weight_decay >= 0.0 && o.weight_decay <= 100.0, "weight_decay", o.weight_decay, "0 to 100");
  require(o.beta1 >= 0.0 && o.beta1 < 1.0, "beta1", o.beta1, "0 or more and below 1");
  require(o.beta2 >= 0.0 && o.beta2 < 1.0, "beta2", o.beta2, "0 or more and below 1");
  require(static_cast<float>(o.eps) > 0.0F && o.eps <= 1.0, "eps", o.eps, "a number above 0 and at most 1 in float32");
  require(o.clip >= 0.0 && std::isfinite(o.clip), "clip", o.clip, "a finite norm, or 0 for none");
  require(o.precision == "float32" || o.precision == "bfloat16", "precision", "'" + o.precision + "'",
          "float32 or bfloat16");
}

void validate_events(const LmOptions& options) {
  const Require require(kTrainLm, "training.");
  const LmTrainOptions& o = options.training;
  if (options.data.train.empty()) throw Error(kTrainLm, "data.train", "\"\"", "a folder of token shards");
  require(o.evaluate_every >= 0 && o.evaluate_every <= kMost, "evaluate_every", o.evaluate_every, "0 to 2^40");
  require(o.evaluate_tokens >= 0 && o.evaluate_tokens <= kMost, "evaluate_tokens", o.evaluate_tokens,
          "0 (all) to 2^40");
  require(o.evaluate_every == 0 || !options.data.validation.empty(), "evaluate_every", o.evaluate_every,
          "0 where there is no data.validation");
  require(o.sample_every >= 0 && o.sample_every <= kMost, "sample_every", o.sample_every, "0 to 2^40");
  require(o.sample_every == 0 || !options.data.tokenizer.empty(), "sample_every", o.sample_every,
          "0 where there is no data.tokenizer");
  require(o.sample_tokens >= 1 && o.sample_tokens <= 65536, "sample_tokens", o.sample_tokens, "1 to 65536");
  require(o.checkpoint_every >= 0 && o.checkpoint_every <= kMost, "checkpoint_every", o.checkpoint_every, "0 to 2^40");
  require(o.keep_checkpoints >= 1, "keep_checkpoints", o.keep_checkpoints, "1 or more");
}

}  // namespace

std::int64_t LmTrainOptions::total_steps() const {
  return steps > 0 ? steps : tokens / tokens_per_step + (tokens % tokens_per_step != 0 ? 1 : 0);
}

LmOptions lm_options_from_json(const io::Fields& config) {
  require_tables(config);
  LmOptions options;
  read_table(
      config, "data", [](auto& o, const auto& visit) { for_each_data_key(o, visit); }, options.data);
  read_table(
      config, "training", [](auto& o, const auto& visit) { for_each_training_key(o, visit); }, options.training);
  config.check([&] {
    validate_sizes(options.training);
    validate_rates(options.training);
    validate_events(options);
  });
  return options;
}

json to_json(const LmOptions& options) {
  json data, training;
  for_each_data_key(options.data, [&](const char* key, const auto& value) { data[key] = value; });
  for_each_training_key(options.training, [&](const char* key, const auto& value) { training[key] = value; });
  return {{"data", data}, {"training", training}};
}

LearningRate learning_rate(const LmTrainOptions& o) {
  return {Schedule::cosine, o.lr, o.min_lr, o.warmup_steps, o.total_steps()};
}

}  // namespace efla::train
