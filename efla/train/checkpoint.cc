#include "efla/train/checkpoint.h"

#include <charconv>
#include <cstring>
#include <vector>

#include "efla/base/error.h"

namespace efla::train {
namespace {

constexpr const char* kFormat = "efla checkpoint 1";

io::NamedTensor entry(const std::string& name, const torch::Tensor& tensor) {
  return {name,
          io::TensorType::F32,
          tensor.sizes().vec(),
          {static_cast<const std::uint8_t*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.nbytes())}};
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw IoError(IoError::Kind::content, path, -1, what);
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

}  // namespace

void write_checkpoint(const std::filesystem::path& path, const NamedParameters& parameters,
                      torch::optim::AdamW& optimizer, std::int64_t step, const nlohmann::json& run) {
  std::vector<io::NamedTensor> entries;
  for (const auto& [name, parameter] : parameters) entries.push_back(entry("model." + name, parameter));
  for (const auto& [name, parameter] : parameters) {
    const auto& state = adamw_state(optimizer, parameter);
    entries.push_back(entry("adamw.exp_avg." + name, state.exp_avg()));
    entries.push_back(entry("adamw.exp_avg_sq." + name, state.exp_avg_sq()));
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
  for (const auto& [name, parameter] : parameters) read("model." + name, parameter);
}

void Checkpoint::read_moments(const NamedParameters& parameters, torch::optim::AdamW& optimizer) const {
  for (const auto& [name, parameter] : parameters) {
    auto& state = adamw_state(optimizer, parameter);
    read("adamw.exp_avg." + name, state.exp_avg());
    read("adamw.exp_avg_sq." + name, state.exp_avg_sq());
    state.step(step_);
  }
}

void Checkpoint::read(const std::string& name, const torch::Tensor& into) const {
  const io::NamedTensor* from = file_.find(name);
  if (!from) refuse(file_.path(), "has no tensor " + name);
  if (from->type != io::TensorType::F32 || from->shape != into.sizes().vec()) {
    refuse(file_.path(), name + " is " + std::string(io::type_name(from->type)) + " " + shape_text(from->shape) +
                             ", expected F32 " + shape_text(into.sizes()));
  }
  std::memcpy(into.data_ptr(), from->bytes.data(), from->bytes.size());
}

}  // namespace efla::train
