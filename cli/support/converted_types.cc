#include "cli/support/converted_types.h"

#include <fmt/core.h>

#include <cstdio>

#include "cli/support/print.h"
#include "efla/base/printable.h"
#include "efla/nn/families/family_config.h"
#include "efla/nn/families/tensor_source.h"

namespace efla::cli {

void report_converted_types(const char* command, const std::string& model, nn::WeightType weights) {
  if (!nn::is_family_folder(model)) return;
  const auto text = nn::open_tensors(model)->conversions(weights);
  if (!text.empty()) print_or_drop(stderr, fmt::format("efla: {}: {}: {}\n", command, printable(model), text));
}

}  // namespace efla::cli
