#include "cli/study.h"

#include <chrono>
#include <ctime>
#include <string>

#include "cli/environment.h"
#include "cli/interrupt.h"
#include "cli/support/command_line.h"
#include "efla/io/file.h"
#include "efla/io/json.h"

namespace efla::cli {
namespace {

constexpr const char* kStudyFile = "study.json";  // what the folder must agree on to be continued

std::string date_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace

io::FolderLock prepare_study_folder(const std::filesystem::path& folder, const nlohmann::json& wanted,
                                    std::string_view operation) {
  auto lock = io::prepare_output_folder(folder, operation, kStudyFile);
  const auto mark = folder / kStudyFile;
  if (std::filesystem::exists(mark)) {
    io::remove_stale_temporaries(folder);
    io::require_same(wanted, io::read_json(mark), operation, mark.string());
  } else {
    io::write_file_atomically(mark, wanted.dump(2) + "\n");
  }
  return lock;
}

nlohmann::ordered_json study_environment(const ThreadPool& pool) {
  nlohmann::ordered_json surroundings = environment();
  surroundings["threads"] = pool.threads();
  surroundings["date"] = date_now();
  surroundings["simd_target"] = surroundings.at("simd").at("target");
  surroundings.erase("simd");
  return surroundings;
}

void stop_study() { end_interrupted("Stopped and saved. The same command goes on from here: " + command_line()); }

}  // namespace efla::cli
