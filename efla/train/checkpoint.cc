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

void write_checkpoint(const std::filesystem::path& path, const FlatParameters& parameters, const FlatAdamW& optimizer,
                      std::int64_t step, const nlohmann::json& run) {
  std::vector<io::NamedTensor> entries;
  const auto add = [&](const std::string& prefix, const torch::Tensor& flat, const FlatParameters::Entry& entry) {
    entries.push_back(nn::named_tensor(prefix + entry.name, parameters.view(flat, entry)));
  };
  for (const auto& entry : parameters.entries()) add("model.", parameters.values(), entry);
  for (const auto& entry : parameters.entries()) {
    add("adamw.exp_avg.", optimizer.exp_avg(), entry);
    add("adamw.exp_avg_sq.", optimizer.exp_avg_sq(), entry);
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

void Checkpoint::read_moments(const FlatParameters& parameters, FlatAdamW& optimizer) const {
  for (const auto& entry : parameters.entries()) {
    nn::read_tensor(file_, "adamw.exp_avg." + entry.name, parameters.view(optimizer.exp_avg(), entry));
    nn::read_tensor(file_, "adamw.exp_avg_sq." + entry.name, parameters.view(optimizer.exp_avg_sq(), entry));
  }
  optimizer.set_steps(step_);
}

}  // namespace efla::train
