// Runs a study in a folder, as the commands of `efla reproduce` do.
#pragma once

#include <filesystem>

#include "efla/base/device.h"
#include "efla/base/threads.h"
#include "experiments/common/study.h"

namespace efla::cli {

// Makes the folder or continues an unfinished one, and leaves results.json and report.html in it. Prints the tables of
// the report. Throws Error where the folder is of another study, holds anything else, or has another
// process that writes it.
void run_study(const experiments::Study& study, const std::filesystem::path& folder, ThreadPool& pool,
               const Device& device);

}  // namespace efla::cli
