// The options --weights, --kv-cache-type, --draft-tokens and --draft-head of the commands that compute with a model.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "efla/rule/problem.h"

namespace efla::cli {

// Adds --weights, whose values are float32, bfloat16, int8 and int4 (nn::parse_weight_type).
inline void add_weights_option(CLI::App& command, std::string& weights) {
  command
      .add_option("--weights", weights,
                  "How the weights of linear layers are stored: float32, bfloat16, int8 with a scale per\n"
                  "64 weights of a row, or int4: MLPs in 4 bits with a scale per 32 weights, all others\n"
                  "in int8; smaller ones decode faster")
      ->check(CLI::IsMember({"float32", "bfloat16", "int8", "int4"}))
      ->capture_default_str();
}

// Adds --kv-cache-type.
inline void add_kv_cache_option(CLI::App& command, std::string& type) {
  command
      .add_option("--kv-cache-type", type,
                  "How a hybrid from Hugging Face stores keys and values: float32, or bfloat16 for\n"
                  "half of the memory; auto: float32, and in a GPU's memory the type of the weights")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}))
      ->capture_default_str();
}

// Adds --draft-tokens and --draft-head.
inline void add_draft_options(CLI::App& command, std::int64_t& draft_tokens, std::int64_t& draft_head) {
  command
      .add_option("--draft-tokens", draft_tokens,
                  "Most tokens that are drafted from repetitions in a text and computed together,\n"
                  "0 to 7; the reply is the same")
      ->check(CLI::Range(std::int64_t{0}, kMaxStepTokens - 1).description(""))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--draft-head", draft_head,
                  "Most tokens that the model's own head for drafts (mtp) predicts and that are\n"
                  "computed together, 0 to 7, on a CPU; the reply is the same")
      ->check(CLI::Range(std::int64_t{0}, kMaxStepTokens - 1).description(""))
      ->type_name("N")
      ->capture_default_str();
}

}  // namespace efla::cli
