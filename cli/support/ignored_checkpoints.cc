#include "cli/support/ignored_checkpoints.h"

#include <fmt/core.h>

#include <cstdio>

#include "cli/support/print.h"
#include "efla/base/printable.h"
#include "efla/io/checkpoint_folder.h"
#include "efla/io/safetensors/safetensors_folder.h"

namespace efla::cli {

void report_ignored_checkpoints(const char* command, const std::filesystem::path& run) {
  for (const auto& path : io::CheckpointFolder(run).ignored()) {
    const char* missing = exists(path / io::kWeightsFile) ? io::kTrainerFile : io::kWeightsFile;
    print_or_drop(stderr,
                  fmt::format("efla: {}: {} has no {}: it is ignored\n", command, printable(path.string()), missing));
  }
}

}  // namespace efla::cli
