#include "cli/study.h"

#include <chrono>
#include <ctime>
#include <string>

#include "cli/environment.h"
#include "cli/interrupt.h"
#include "cli/smnist.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/train/options.h"

namespace efla::cli {
namespace {

std::string date_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace

void prepare_study_folder(const std::filesystem::path& folder, const nlohmann::json& wanted,
                          std::string_view operation) {
  const auto mark = folder / "study.json";
  if (std::filesystem::exists(mark)) {
    train::require_same(wanted, io::read_json(mark), operation, mark.string());
    return;
  }
  io::prepare_output_folder(folder, operation);
  io::write_file_atomically(mark, wanted.dump(2) + "\n");
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
