// What the studies of `efla reproduce` share.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "efla/base/threads.h"

namespace efla::cli {

// Accepts an unfinished folder of the study that `wanted` describes; makes and marks a new one otherwise. Throws Error
// where the folder is of another study or has anything else in it.
void prepare_study_folder(const std::filesystem::path& folder, const nlohmann::json& wanted,
                          std::string_view operation);

// The "environment" of results.json.
nlohmann::ordered_json study_environment(const ThreadPool& pool);

// Ends the subcommand after an interrupt, saying how to go on.
[[noreturn]] void stop_study();

}  // namespace efla::cli
