// The folders beside a run's checkpoints.
#pragma once

#include <filesystem>

namespace efla::cli {

// Says on standard error which folders among the checkpoints of the run are ignored, because they are not complete.
void report_ignored_checkpoints(const char* command, const std::filesystem::path& run);

}  // namespace efla::cli
