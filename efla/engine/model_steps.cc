#include "efla/engine/model_steps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "efla/ops/gpu.h"
#include "efla/torch/host_copy.h"

namespace efla::engine {

using torch::Tensor;

double StepModel::memory_bytes() const {
  if (!device().is_cuda()) return EngineModel::memory_bytes();
  const auto gpus = find_gpus().found;
  const auto index = static_cast<std::size_t>(std::max<int>(0, device().index()));
  return index < gpus.size() ? static_cast<double>(gpus[index].memory_bytes) : INFINITY;
}

std::size_t StepModel::bytes_of(const nn::LanguageModel& model) {
  std::size_t bytes = 0;
  for (const auto& parameter : model.parameters()) bytes += parameter.nbytes();
  return bytes;
}

Tensor StepModel::on_device(const std::vector<std::int64_t>& numbers) const {
  return torch::tensor(numbers, torch::kLong).to(device(), torch::kLong, /*non_blocking=*/true);
}

void StepModel::advance(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs, ThreadPool& /*pool*/) {
  const torch::NoGradGuard no_grad;
  const auto first_prompt = std::ranges::find_if(runs, [](const nn::TextRun& run) { return !run.decode; });
  const auto decoded = runs.first(static_cast<std::size_t>(first_prompt - runs.begin()));
  const auto prompts = runs.subspan(decoded.size());
  leave_rows(decoded);
  decoded_.clear();
  if (!decoded.empty()) decode(ids.first(decoded.size()), decoded);
  if (prompts.empty()) return;
  hidden_ = read(ids.subspan(decoded.size()), prompts);
  hidden_.select(0, -1).to(torch::kCPU);  // because the engine measures how long prompts take
}

// Decodes a token of each run, unless draw has begun to.
void StepModel::decode(std::span<const std::int32_t> ids, std::span<const nn::TextRun> runs) {
  // A text that was not in the step that draw has begun has no row.
  const bool begun = std::exchange(begun_, false) &&
                     std::ranges::all_of(runs, [&](const nn::TextRun& run) { return row_of(run.slot) >= 0; });
  if (!begun) {
    std::vector<std::int64_t> of_rows(static_cast<std::size_t>(take_rows(runs)));  // a row without a text takes any id
    for (std::size_t i = 0; i < runs.size(); ++i) of_rows[static_cast<std::size_t>(row_of(runs[i].slot))] = ids[i];
    step_ = step(on_device(of_rows));
  }
  for (const auto& run : runs) decoded_.push_back({run, row_of(run.slot)});
}

// Begins to decode the tokens that were drawn after the last step, ids [rows] on the device.
void StepModel::begin_step(const Tensor& ids) {
  std::vector<nn::TextRun> runs;
  for (const auto& decoded : decoded_) runs.push_back(decoded.run);
  std::vector<std::int64_t> from(static_cast<std::size_t>(take_rows(runs)));  // the earlier row of each row's text
  bool same = std::cmp_equal(from.size(), ids.size(0));
  for (const auto& decoded : decoded_) {
    const auto row = row_of(decoded.run.slot);
    from[static_cast<std::size_t>(row)] = decoded.row;
    same = same && row == decoded.row;
  }
  step_ = step(same ? ids : ids.index_select(0, on_device(from)));
  begun_ = true;
}

// Returns the logits [rows, vocab_size] after some ids of the last advance, on the device.
Tensor StepModel::logits_of(std::span<const std::int64_t> rows) const {
  std::vector<std::int64_t> of_step, of_prompts, order;
  for (const auto row : rows) {
    const auto prompt = row - std::ssize(decoded_);
    prompt < 0 ? of_step.push_back(decoded_[static_cast<std::size_t>(row)].row) : of_prompts.push_back(prompt);
  }
  if (of_prompts.empty()) return step_.logits.index_select(0, on_device(of_step));
  const auto of_read = head(hidden_.index_select(0, on_device(of_prompts)));
  if (of_step.empty()) return of_read;
  std::int64_t next_step = 0, next_read = std::ssize(of_step);
  for (const auto row : rows) order.push_back(std::cmp_less(row, decoded_.size()) ? next_step++ : next_read++);
  return torch::cat({step_.logits.index_select(0, on_device(of_step)), of_read}).index_select(0, on_device(order));
}

View<float, 2> StepModel::logits(std::span<const std::int64_t> rows, ThreadPool& /*pool*/) {
  const torch::NoGradGuard no_grad;
  const auto all = logits_of(rows);
  if (!logits_.defined() || logits_.size(0) < all.size(0)) {
    logits_ = torch::empty(all.sizes(), torch::TensorOptions().pinned_memory(device().is_cuda()));
  }
  logits_.narrow(0, 0, all.size(0)).copy_(all);
  return View<float, 2>::contiguous(logits_.data_ptr<float>(), {all.size(0), all.size(1)});
}

std::vector<DrawnId> StepModel::draw(std::span<const std::int64_t> rows, std::span<const Draw> draws,
                                     const SamplingOptions& options, std::int64_t drawable, bool ahead) {
  const torch::NoGradGuard no_grad;
  const bool of_step = std::ranges::all_of(rows, [&](std::int64_t row) { return std::cmp_less(row, decoded_.size()); });
  std::vector<std::int64_t> places;  // of the rows in what is drawn
  Tensor drawn;
  if (of_step) {  // in the order of the step's rows, so that nothing is copied
    std::vector<Draw> of_rows(static_cast<std::size_t>(step_.logits.size(0)));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      places.push_back(decoded_[static_cast<std::size_t>(rows[i])].row);
      of_rows[static_cast<std::size_t>(places.back())] = draws[i];
    }
    const bool takes_likeliest = options.temperature == 0.0 && options.repetition_penalty == 1.0;
    drawn = takes_likeliest ? step_.likeliest : sample_rows(step_.logits.narrow(1, 0, drawable), of_rows, options);
  } else {
    for (std::int64_t i = 0; i < std::ssize(rows); ++i) places.push_back(i);
    drawn = sample_rows(logits_of(rows).narrow(1, 0, drawable), draws, options);
  }
  libtorch::HostCopy copy(drawn);
  if (ahead) begin_step(drawn.select(1, 0).to(torch::kLong));
  const auto values = copy.get().accessor<double, 2>();
  std::vector<DrawnId> ids;
  for (const auto place : places) ids.push_back({static_cast<std::int32_t>(values[place][0]), values[place][1]});
  return ids;
}

}  // namespace efla::engine
