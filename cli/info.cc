// efla info: what this program is and what it runs on.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/support/environment.h"
#ifdef EFLA_TORCH
#include "cli/support/model_description.h"
#endif
#include "efla/io/json.h"
#include "efla/ops/gpu.h"

namespace efla::cli {
namespace {

std::string text_or(const nlohmann::ordered_json& value, const std::string& otherwise) {
  return value.is_null() ? otherwise : value.get<std::string>();
}

// Returns, for example, "NVIDIA H200 (140 GiB, compute capability 9.0)", or why there are none.
std::string gpus_text(const nlohmann::ordered_json& gpus) {
  if (gpus.empty()) return "none: " + find_gpus().absence;
  std::vector<std::string> names;
  for (const auto& gpu : gpus) {
    names.push_back(fmt::format("{} ({:.0f} GiB, compute capability {})", gpu["name"].get<std::string>(),
                                gpu["memory_bytes"].get<double>() / double(1 << 30),
                                gpu["compute_capability"].get<std::string>()));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void print_text(const nlohmann::ordered_json& all) {
  const auto line = [](const char* name, const std::string& value) { fmt::print("{:<12}{}\n", name, value); };
  line("version", all["version"]);
  line("commit", all["commit"]);
  line("compiler", all["compiler"].get<std::string>() + ", " + all["build_type"].get<std::string>());
  line("cpu", all["cpu"]);
  const auto supported = all["simd"]["supported"].get<std::vector<std::string>>();
  line("simd", fmt::format("{} (of {})", all["simd"]["target"].get<std::string>(), fmt::join(supported, ", ")));
  line("threads", all["threads"].dump());
  line("libtorch", text_or(all["libtorch"], "not built in"));
  const std::string blas = text_or(all["blas"], "not used");
  line("blas", all["blas_core"].is_null() ? blas : blas + ", kernels for " + all["blas_core"].get<std::string>());
  line("cuda", all["cuda"].get<bool>() ? "yes" : "no");
  line("gpus", gpus_text(all["gpus"]));
}

}  // namespace

void add_info(CLI::App& program) {
  auto* command = program.add_subcommand(
      "info", "Print the version, the processor, and what the program was built with; or describe a model");
  auto json = std::make_shared<bool>(false);
  auto model = std::make_shared<std::string>();
#ifdef EFLA_TORCH
  command->add_option("MODEL", *model,
                      "Folder of a model, GGUF file, or folder of a run of efla train lm: describe it instead");
#endif
  command->add_flag("--json", *json, "Print one JSON object");
  command->callback([json, model] {
#ifdef EFLA_TORCH
    const auto all = model->empty() ? environment() : model_description(*model);
#else
    const auto all = environment();
#endif
    if (*json) {
      fmt::print("{}", io::to_json_text(all));
    } else if (model->empty()) {
      print_text(all);
    } else {
      for (const auto& [name, value] : all.items()) {
        fmt::print("{:<20}{}\n", name, value.is_string() ? value.get<std::string>() : value.dump());
      }
    }
  });
}

}  // namespace efla::cli
