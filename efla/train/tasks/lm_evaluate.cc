#include "efla/train/tasks/lm_evaluate.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string>

#include "efla/base/error.h"

namespace efla::train {
namespace {

// The sums of a batch, in their order in a rank's gathered values.
enum Value : std::size_t { kLoss, kCounted, kBytes, kValues };

std::int64_t bytes_of_targets(const data::PackedBatch& batch, const TokenBytes& tokens) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < batch.targets.size(); ++i) {
    if (batch.targets[i] == kIgnoreIndex) continue;
    if (batch.targets[i] >= std::ssize(tokens.bytes)) {
      throw Error("evaluate", "tokens", "token " + std::to_string(batch.targets[i]),
                  "one of the tokenizer's " + std::to_string(tokens.bytes.size()));
    }
    bytes += tokens.bytes[batch.targets[i]];
    if (batch.inputs[i] == tokens.space_after && tokens.bytes[batch.targets[i]] > 0) --bytes;
  }
  return bytes;
}

// Returns the number of rows that the first `tokens` of the corpus (0: all) are in.
std::int64_t rows_of(const data::TokenWindows& windows, std::int64_t length, std::int64_t tokens) {
  return tokens == 0 ? windows.count() : std::min((tokens + length - 1) / length, windows.count());
}

// Rounds up to a number of at most three binary digits followed by zeros. From one power of two to the next there are
// four such numbers.
std::size_t rounded_up(std::size_t count) {
  std::size_t unit = 1;
  while (unit * 8 < count) unit *= 2;
  return (count + unit - 1) / unit * unit;
}

}  // namespace

LmBatch make_batch(const data::PackedBatch& batch, torch::Device device) {
  std::vector<std::int64_t> cu_seqlens = batch.cu_seqlens;
  if (device.is_cuda()) cu_seqlens.resize(rounded_up(cu_seqlens.size() - 1) + 1, cu_seqlens.back());
  const auto tokens = std::ssize(batch.inputs), count = std::ssize(cu_seqlens);
  // One buffer, in memory from which a GPU can copy while the program goes on.
  torch::Tensor all =
      torch::empty({2 * tokens + count}, torch::TensorOptions(torch::kInt64).pinned_memory(device.is_cuda()));
  auto* place = all.data_ptr<std::int64_t>();
  const auto append = [&](const std::vector<std::int64_t>& values) {
    place = std::copy(values.begin(), values.end(), place);
  };
  append(batch.inputs);
  append(batch.targets);
  append(cu_seqlens);
  all = all.to(device, /*non_blocking=*/true);
  const auto counted = std::count_if(batch.targets.begin(), batch.targets.end(),
                                     [](std::int64_t target) { return target != kIgnoreIndex; });
  return {all.narrow(0, 0, tokens).unsqueeze(0), all.narrow(0, tokens, tokens).unsqueeze(0),
          all.narrow(0, 2 * tokens, count), counted, batch.tokens};
}

LmReplica replica_of(const std::shared_ptr<nn::LanguageModel>& model) {
  return {
      nn::named_parameters(*model),
      [model](const LmBatch& batch) { return model->loss_of_checked(batch.inputs, batch.targets, batch.cu_seqlens); },
      !model->waits_for_gpu()};
}

bool has_targets(const io::TokenFolder& corpus, std::int64_t length, std::int64_t tokens) {
  const data::TokenWindows windows(corpus, length);
  const std::int64_t rows = rows_of(windows, length, tokens);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto targets = windows.read({&row, 1}).targets;
    if (std::any_of(targets.begin(), targets.end(), [](auto target) { return target != kIgnoreIndex; })) return true;
  }
  return false;
}

LmEvaluation evaluate(const DataParallel& model, const std::vector<LmReplica>& copies, const io::TokenFolder& corpus,
                      const LmTrainOptions& options, ProcessGroup& group, const TokenBytes& token_bytes,
                      const StopFunction& stop) {
  const data::TokenWindows windows(corpus, options.sequence_length);
  const std::int64_t rows = rows_of(windows, options.sequence_length, options.evaluate_tokens);
  const std::int64_t batches = (rows + options.micro_batch - 1) / options.micro_batch;
  std::vector<double> values(batches * kValues + 1);  // the last one: whether this rank was stopped
  const std::int64_t mine = (batches - group.rank() + group.size() - 1) / group.size();
  std::atomic<bool> stopped = false;
  model.run(mine, [&](std::int64_t i, int copy) {
    if (stopped || (stop && stop())) {
      stopped = true;
      return;
    }
    const torch::NoGradGuard no_grad;
    const auto precision = model.use_precision();
    const std::int64_t index = i * group.size() + group.rank(), first = index * options.micro_batch;
    std::vector<std::int64_t> batch_rows(std::min(options.micro_batch, rows - first));
    std::iota(batch_rows.begin(), batch_rows.end(), first);
    const data::PackedBatch packed = windows.read(batch_rows);
    const LmBatch batch = make_batch(packed, model.device());
    if (batch.counted == 0) return;
    double* sums = values.data() + index * kValues;
    sums[kLoss] =
        copies[static_cast<std::size_t>(copy)].loss(batch).item<double>() * static_cast<double>(batch.counted);
    sums[kCounted] = static_cast<double>(batch.counted);
    if (!token_bytes.bytes.empty()) sums[kBytes] = static_cast<double>(bytes_of_targets(packed, token_bytes));
  });
  values.back() = stopped ? 1.0 : 0.0;
  double loss = 0.0, counted = 0.0, bytes = 0.0;
  const auto gathered = group.gather(values);
  for (const auto& of_rank : gathered) {
    if (of_rank.back() > 0.0) throw Stopped();
  }
  for (std::int64_t i = 0; i < batches; ++i) {
    const double* sums = gathered[i % group.size()].data() + i * kValues;
    loss += sums[kLoss];
    counted += sums[kCounted];
    bytes += sums[kBytes];
  }
  LmEvaluation result;
  result.tokens = static_cast<std::int64_t>(counted);
  result.loss = loss / counted;
  result.perplexity = std::exp(result.loss);
  if (bytes > 0.0) result.bits_per_byte = loss / std::numbers::ln2 / bytes;
  return result;
}

}  // namespace efla::train
