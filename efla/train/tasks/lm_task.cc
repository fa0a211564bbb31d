#include "efla/train/tasks/lm_task.h"

#include <string>
#include <utility>

#include "efla/base/error.h"

namespace efla::train {
namespace {

std::int64_t micro_batches_of(const LmTrainOptions& options, int ranks) {
  const std::int64_t rows = options.micro_batch * ranks;
  if (options.rows_per_step() % rows != 0) {
    throw Error(
        "train lm", "training.tokens_per_step", std::to_string(options.tokens_per_step),
        "a multiple of sequence_length x micro_batch x processes = " + std::to_string(options.sequence_length * rows));
  }
  return options.rows_per_step() / rows;
}

data::PackedOptions packed_options(const LmTrainOptions& options, const ProcessGroup& group) {
  return {options.sequence_length, options.micro_batch * group.size(), options.seed, group.rank(), group.size()};
}

}  // namespace

LmTask::LmTask(MakeModel make, LmData data, const LmTrainOptions& options, const ProcessGroup& group,
               torch::Device device, LmFiles files)
    : make_(std::move(make)),
      data_(std::move(data)),
      options_(options),
      device_(device),
      files_(std::move(files)),
      micro_batches_(micro_batches_of(options, group.size())),
      batches_(*data_.train, packed_options(options, group)) {}

nn::NamedParameters LmTask::add_copy() {
  copies_.push_back(make_());
  return copies_.back().parameters;
}

nlohmann::ordered_json LmTask::progress(std::int64_t /*step*/, std::int64_t examples) const {
  return {{"tokens", examples}};
}

std::int64_t LmTask::draw(std::int64_t /*step*/) {
  drawn_.clear();
  for (std::int64_t i = 0; i < micro_batches_; ++i) drawn_.push_back(batches_.next());
  return micro_batches_;
}

Part LmTask::part(std::int64_t i) {
  const LmBatch batch = make_batch(drawn_[static_cast<std::size_t>(i)], device_);
  const auto counted = static_cast<double>(batch.counted);
  // Of the step's targets.
  const torch::Tensor share =
      torch::full({}, counted / normaliser(), torch::TensorOptions(torch::kFloat).device(device_));
  return {{batch.inputs, batch.targets, batch.cu_seqlens, share}, batch.counted, batch.tokens, counted};
}

PartLoss LmTask::loss(const std::vector<torch::Tensor>& inputs, int copy) {
  const torch::Tensor mean = copies_[static_cast<std::size_t>(copy)].loss({inputs[0], inputs[1], inputs[2]});
  return {mean * inputs[3], mean.detach(), {}};
}

nlohmann::json LmTask::position() const {
  return {{"epoch", batches_.position().epoch}, {"index", batches_.position().index}};
}

void LmTask::seek(const io::Fields& position) {
  const data::PackedPosition place{position.get<std::int64_t>("epoch"), position.get<std::int64_t>("index")};
  position.check([&] { batches_.seek(place); });
}

nlohmann::ordered_json LmTask::evaluate(const DataParallel& model, ProcessGroup& group, const StopFunction& stop) {
  const LmEvaluation e = train::evaluate(model, copies_, *data_.validation, options_, group, data_.token_bytes, stop);
  if (!std::isfinite(e.loss)) throw NonFinite("the validation loss is " + std::to_string(e.loss));
  nlohmann::ordered_json fields = {{"loss", e.loss}, {"perplexity", e.perplexity}};
  if (e.bits_per_byte) fields["bits_per_byte"] = *e.bits_per_byte;
  return fields;
}

void LmTask::write_model(const std::filesystem::path& folder, const FlatParameters& parameters) const {
  if (!files_.write) return Task::write_model(folder, parameters);
  files_.write(folder);
}

UpdateOptions update_options(const LmTrainOptions& options) {
  return {{options.beta1, options.beta2, options.eps, options.weight_decay}, options.clip};
}

RunOptions run_options(const LmTrainOptions& options, bool has_validation) {
  RunOptions run;
  run.evaluate = has_validation;
  run.evaluate_every = options.evaluate_every;
  run.sample_every = options.sample_every;
  run.checkpoint_every = options.checkpoint_every;
  run.keep_checkpoints = options.keep_checkpoints;
  return run;
}

}  // namespace efla::train
