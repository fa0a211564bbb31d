#include "efla/train/checkpoint.h"

#include <charconv>
#include <vector>

#include "efla/base/error.h"
#include "efla/nn/named_tensor.h"

namespace efla::train {
namespace {

constexpr const char* kFormat = "efla checkpoint 1";

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw IoError(IoError::Kind::content, path, -1, what);
}

}  // namespace

void write_checkpoint(const std::filesystem::path& path, const NamedParameters& parameters,
                      torch::optim::AdamW& optimizer, std::int64_t step, const nlohmann::json& run) {
  std::vector<io::NamedTensor> entries;
  for (const auto& [name, parameter] : parameters) entries.push_back(nn::named_tensor("model." + name, parameter));
  for (const auto& [name, parameter] : parameters) {
    const auto& state = adamw_state(optimizer, parameter);
    entries.push_back(nn::named_tensor("adamw.exp_avg." + name, state.exp_avg()));
    entries.push_back(nn::named_tensor("adamw.exp_avg_sq." + name, state.exp_avg_sq()));
  }
  io::write_safetensors(path, entries, {{"format", kFormat}, {"step", std::to_string(step)}, {"run", run.dump()}});
}

Checkpoint::Checkpoint(const std::filesystem::path& path) : file_(path) {
  const auto& metadata = file_.metadata();
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second != kFormat) {
    refuse(file_.path(), std::string("not a checkpoint (its metadata has no format \"") + kFormat + "\")");
  }
  const auto step = metadata.find("step");
  const auto run = metadata.find("run");
  if (step == metadata.end() || run == metadata.end()) refuse(file_.path(), "its metadata has no step or no run");
  const char* end = step->second.data() + step->second.size();
  if (std::from_chars(step->second.data(), end, step_).ptr != end || step_ < 0) {
    refuse(file_.path(), "its step is \"" + step->second + "\", which is not a count");
  }
  run_ = nlohmann::json::parse(run->second, nullptr, /*allow_exceptions=*/false);
  if (!run_.is_object()) refuse(file_.path(), "its metadata's run is not a JSON object");
}

void Checkpoint::read_parameters(const NamedParameters& parameters) const {
  for (const auto& [name, parameter] : parameters) nn::read_tensor(file_, "model." + name, parameter);
}

void Checkpoint::read_moments(const NamedParameters& parameters, torch::optim::AdamW& optimizer) const {
  for (const auto& [name, parameter] : parameters) {
    auto& state = adamw_state(optimizer, parameter);
    nn::read_tensor(file_, "adamw.exp_avg." + name, state.exp_avg());
    nn::read_tensor(file_, "adamw.exp_avg_sq." + name, state.exp_avg_sq());
    state.step(step_);
  }
}

}  // namespace efla::train
