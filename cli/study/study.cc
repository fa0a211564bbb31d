#include "cli/study/study.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "cli/support/environment.h"
#include "cli/support/interrupt.h"
#include "cli/support/progress_bar.h"
#include "efla/base/error.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"
#include "efla/train/metrics_log.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStudyFile = "study.json";  // what the folder must agree on to be continued

std::string date_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

nlohmann::ordered_json study_environment(const ThreadPool& pool) {
  nlohmann::ordered_json surroundings = environment();
  surroundings["threads"] = pool.threads();
  surroundings["date"] = date_now();
  surroundings["simd_target"] = surroundings.at("simd").at("target");
  surroundings.erase("simd");
  return surroundings;
}

// Throws Error unless `mark`, the folder's study.json, describes the wanted study. Compares the study, its scale and
// its other settings in this order and then the runs, because each follows from those before it.
void require_same_study(const nlohmann::json& wanted, const fs::path& mark, const std::string& operation) {
  const auto found = io::read_json(mark);
  const io::Fields fields(found, io::refuse_in_file(mark.string()));
  for (const char* place : {"/study", "/settings/scale", "/settings"}) {
    const nlohmann::json::json_pointer part(place);
    nlohmann::json asked, kept;
    asked[part] = wanted.at(part);
    kept[part] = found.contains(part) ? found.at(part) : nlohmann::json();
    io::require_same(asked, kept, operation, mark.string());
  }
  io::require_same(wanted, found, operation, mark.string());
}

// The folder of a study while a command works in it.
class StudyFolder {
 public:
  // Locks an unfinished folder of the study, or makes, locks and marks a new one.
  StudyFolder(const fs::path& folder, const experiments::Study& study)
      : folder_(folder), lock_(io::prepare_output_folder(folder, "reproduce " + study.name, kStudyFile)) {
    const auto wanted = experiments::description(study);
    const auto mark = folder / kStudyFile;
    io::remove_stale_temporaries(folder);
    is_new_ = !fs::exists(mark);
    if (is_new_) {
      io::write_file_atomically(mark, wanted.dump(2) + "\n");
    } else {
      require_same_study(wanted, mark, "reproduce " + study.name);
    }
  }

  // Empties a new folder whose first runs were refused before a step, so that the corrected command can use it.
  void give_back() const {
    if (!is_new_) return;
    std::error_code ignored;  // the user needs the first error
    for (const auto& run : fs::directory_iterator(folder_ / "runs", ignored)) {
      if (fs::exists(run.path() / train::kMetricsFile)) return;
    }
    fs::remove_all(folder_ / "runs", ignored);
    fs::remove(folder_ / kStudyFile, ignored);
  }

 private:
  fs::path folder_;
  io::FolderLock lock_;
  bool is_new_ = false;
};

// Prints the tables of numbers that the page shows without a click.
void print_tables(const report::Report& report) {
  for (const auto& section : report.sections) {
    for (const auto& table : section.tables) {
      const bool numbers =
          std::any_of(table.columns.begin(), table.columns.end(), [](const auto& c) { return c.number; });
      if (numbers && !table.folded && !table.rows.empty()) fmt::print("{}\n{}\n", table.title, report::as_text(table));
    }
  }
}

}  // namespace

void run_study(const experiments::Study& study, const fs::path& folder, ThreadPool& pool, const Device& device) {
  const StudyFolder place(folder, study);
  watch_for_interrupts();
  ProgressBar bar(study.name);
  experiments::StudyEvents events;
  events.stop = interrupted;
  events.progress = [&](double share, const std::string& text) { bar.draw(share, text, /*plain_line=*/false); };
  events.line = [&](const std::string& text) { bar.line(text); };
  std::optional<std::vector<nlohmann::ordered_json>> runs;
  try {
    runs = experiments::run_study(study, folder, pool, events, device);
  } catch (const Error&) {
    place.give_back();
    throw;
  }
  bar.clear();
  if (!runs) end_interrupted("Stopped and saved. The same command continues from here: " + command_line());
  const auto report = study.report({*runs, command_line(), study_environment(pool)});
  const auto page = report::write(report, folder);
  print_tables(report);
  for (const auto& text : {report.summary, report.caveat}) {
    if (!text.empty()) fmt::print("{}\n\n", text);
  }
  fmt::print("report: {}\n", page.string());
}

}  // namespace efla::cli
