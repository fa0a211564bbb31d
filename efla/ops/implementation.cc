#include "efla/ops/implementation.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/device.h"
#endif

namespace efla {
namespace {

// Returns why a row for one kind of device refuses the tensors of a device of the other kind.
std::string refuse_device(Device::Kind row, const Device& tensors) {
  return std::string(row == Device::Kind::cpu ? "it computes on the CPU" : "it computes on a GPU") +
         ", and the tensors are on " + name_of(tensors);
}

}  // namespace

std::vector<std::string> selectable_names(const std::vector<ImplementationName>& rows) {
  std::vector<std::string> names{"auto"};
  const auto add = [&](std::string_view name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
  };
  for (const auto& row : rows) add(row.algorithm);
  for (const auto& row : rows) add(row.name);
  return names;
}

#ifdef EFLA_HAS_CUDA
OnDeviceOf::OnDeviceOf(const Device& tensors) {
  if (!tensors.is_cpu()) before_ = gpu::make_current(tensors.index);
}
OnDeviceOf::~OnDeviceOf() {
  if (before_ >= 0) gpu::restore_current(before_);
}
#else
OnDeviceOf::OnDeviceOf(const Device& /*tensors*/) {}
OnDeviceOf::~OnDeviceOf() = default;
#endif

void throw_no_implementation(const char* operation, const RunOptions& options,
                             const std::vector<ImplementationName>& rows, const std::vector<Refusal>& refusals) {
  const std::string got = "'" + std::string(options.implementation) + "'";
  std::string text;
  const auto add = [&](const std::string& part, const char* between) { text += (text.empty() ? "" : between) + part; };
  auto refusal = refusals.begin();
  for (const auto& row : rows) {
    if (!is_asked(options, row.name, row.algorithm)) continue;
    const bool elsewhere = row.device != options.context.device.kind;
    add(std::string(row.name) + ": " +
            (elsewhere ? refuse_device(row.device, options.context.device) : (refusal++)->reason),
        "; ");
  }
  if (text.empty()) {
    for (const auto& name : selectable_names(rows)) add(name, ", ");
    throw Error(operation, "implementation", got, "one of " + text);
  }
  throw Error(operation, "implementation", got, "one that takes this problem (" + text + ")");
}

}  // namespace efla
