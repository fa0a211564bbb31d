#include "cli/study/study.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string>

#include "cli/support/environment.h"
#include "cli/support/interrupt.h"
#include "cli/support/progress_bar.h"
#include "efla/io/file.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"

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

// Locks an unfinished folder of the study, or makes, locks and marks a new one.
io::FolderLock prepare_folder(const fs::path& folder, const experiments::Study& study) {
  const auto operation = "reproduce " + study.name;
  const auto wanted = experiments::description(study);
  auto lock = io::prepare_output_folder(folder, operation, kStudyFile);
  const auto mark = folder / kStudyFile;
  io::remove_stale_temporaries(folder);
  if (fs::exists(mark)) {
    io::require_same(wanted, io::read_json(mark), operation, mark.string());
  } else {
    io::write_file_atomically(mark, wanted.dump(2) + "\n");
  }
  return lock;
}

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
  const auto lock = prepare_folder(folder, study);
  watch_for_interrupts();
  ProgressBar bar(study.name);
  experiments::StudyEvents events;
  events.stop = interrupted;
  events.progress = [&](double share, const std::string& text) { bar.draw(share, text, /*plain_line=*/false); };
  events.finished = [&](const std::string& text) { bar.line(text); };
  const auto runs = experiments::run_study(study, folder, pool, events, device);
  bar.clear();
  if (!runs) end_interrupted("Stopped and saved. The same command continues from here: " + command_line());
  const auto report = study.report({*runs, command_line(), study_environment(pool)});
  const auto page = report::write(report, folder);
  print_tables(report);
  fmt::print("report: {}\n", page.string());
}

}  // namespace efla::cli
