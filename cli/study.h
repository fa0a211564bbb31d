// What the studies of `efla reproduce` share.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "efla/base/threads.h"
#include "efla/io/folder_lock.h"

namespace efla::cli {

// Locks an unfinished folder of the study that `wanted` describes, or makes, locks and marks a new one. Throws Error
// where the folder is of another study, has anything else in it, or has another process that writes it.
[[nodiscard]] io::FolderLock prepare_study_folder(const std::filesystem::path& folder, const nlohmann::json& wanted,
                                                  std::string_view operation);

// The "environment" of results.json.
nlohmann::ordered_json study_environment(const ThreadPool& pool);

// Ends the subcommand after an interrupt, saying how to go on.
[[noreturn]] void stop_study();

}  // namespace efla::cli
