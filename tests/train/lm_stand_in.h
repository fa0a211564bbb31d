// A language model of a few hundred parameters and a corpus to go with it: seconds become milliseconds.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "efla/io/tokens/token_folder.h"
#include "efla/io/tokens/token_shard.h"
#include "efla/train/tasks/lm_task.h"

namespace efla::test {

inline constexpr std::int64_t kSmallVocabulary = 12;

// Documents of 5 to 30 tokens, in which each token is mostly the one before plus 1.
inline void write_small_corpus(const std::filesystem::path& folder, int documents, std::uint64_t seed) {
  std::filesystem::create_directories(folder);
  io::TokenIndex index;
  index.tokenizer = {"small", std::string(64, 'a'), kSmallVocabulary, -1, 0};
  io::TokenShardWriter writer(folder / "shard", index.tokenizer);
  Random random(seed);
  for (int d = 0; d < documents; ++d) {
    std::vector<std::int32_t> ids{static_cast<std::int32_t>(random.below(kSmallVocabulary))};
    const std::size_t length = 5 + random.below(26);
    while (ids.size() < length) {
      const std::int32_t next =
          random.below(8) == 0 ? static_cast<std::int32_t>(random.below(kSmallVocabulary)) : ids.back() + 1;
      ids.push_back(next % static_cast<std::int32_t>(kSmallVocabulary));
    }
    writer.append(ids);
    writer.end_document();
  }
  index.shards.push_back({"shard", writer.tokens(), writer.documents(), ""});
  index.shards.back().sha256 = writer.commit();
  index.source = {{"made", "here"}};
  io::write_token_index(folder, index);
}

// logits = W₂ tanh(W₁ e[id] + b₁), and a parameter that nothing uses.
inline train::LmReplica small_language_model(std::uint64_t seed) {
  Random random(seed);
  const auto parameter = [&](std::vector<std::int64_t> shape) {
    torch::Tensor tensor = torch::empty(shape);
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.data_ptr<float>()[i] = static_cast<float>(0.3 * random.normal());
    }
    return tensor.requires_grad_(true);
  };
  const auto e = parameter({kSmallVocabulary, 8}), w1 = parameter({16, 8}), b1 = parameter({16}),
             unused = parameter({5}), w2 = parameter({kSmallVocabulary, 16});
  train::LmReplica replica;
  replica.parameters = {{"e", e}, {"w1", w1}, {"b1", b1}, {"unused", unused}, {"w2", w2}};
  replica.loss = [=](const train::LmBatch& batch) {
    namespace functional = torch::nn::functional;
    const auto x = functional::embedding(batch.inputs.flatten(), e);
    const auto logits = functional::linear(torch::tanh(functional::linear(x, w1, b1)), w2);
    return functional::cross_entropy(logits, batch.targets.flatten());
  };
  return replica;
}

inline train::LmTrainOptions small_options() {
  train::LmTrainOptions options;
  options.sequence_length = 16;
  options.tokens_per_step = 128;
  options.micro_batch = 2;
  options.steps = 12;
  options.lr = 0.02;
  options.min_lr = 0.002;
  options.warmup_steps = 3;
  options.keep_checkpoints = 2;
  return options;
}

inline std::vector<float> values_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), tensor.data_ptr<float>() + tensor.numel()};
}

}  // namespace efla::test
