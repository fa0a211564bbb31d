// A study: training runs, several of them side by side, each in a folder of its own, and the report on them.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/base/device.h"
#include "efla/base/threads.h"
#include "efla/io/fields.h"
#include "efla/report/report.h"

namespace efla::experiments {

struct RunContext {
  ThreadPool& pool;
  Device device;                                                        // of models
  std::function<bool()> stop;                                           // asked between steps
  std::function<void(double share, const std::string& text)> progress;  // share of the run's work, in [0, 1]
};

struct StudyRun {
  std::string name;            // of its folder, different for each run
  nlohmann::json description;  // what an unfinished folder must agree on; null where the study's settings have it all

  // Trains and measures in an existing folder, from the checkpoint there if there is one. Returns the run's entry of
  // results.json, or nothing where it was stopped, with a checkpoint saved.
  std::function<std::optional<nlohmann::ordered_json>(const std::filesystem::path& folder, const RunContext& context)>
      execute;
  // Removes what is not needed once the entry is kept.
  std::function<void(const std::filesystem::path& folder)> tidy = {};
};

// What a finished study knows.
struct Outcome {
  std::vector<nlohmann::ordered_json> runs;  // the entries, in the order of the runs
  std::string command;
  nlohmann::ordered_json environment;
};

struct Study {
  std::string name;         // of its command, as in `efla reproduce mad`
  nlohmann::json settings;  // what an unfinished folder must agree on, besides the runs
  std::vector<StudyRun> runs;
  // Returns the runs that depend on the entries of the first; none where it is empty.
  std::function<std::vector<StudyRun>(const std::vector<nlohmann::ordered_json>& entries)> more = {};
  std::function<std::string(const nlohmann::ordered_json& entry)> brief;  // what came out, in a few words
  std::function<report::Report(const Outcome& outcome)> report;
  bool fills_gpu = false;  // whether one run keeps a GPU busy; on a GPU the runs then follow one another
  // Throws for a field of a kept entry that `brief` and `report` need and that is missing or of another type.
  std::function<void(const io::Fields& entry)> check = {};
};

struct StudyEvents {
  std::function<bool()> stop;
  // The mean share of all runs, and what one of them says. Called by one thread at a time.
  std::function<void(double share, const std::string& text)> progress;
  // A line about a run that has ended, counted ("3 of 8: NAME: …"), or that must wait for memory. Called by one thread
  // at a time.
  std::function<void(const std::string& text)> line;
};

// Returns what study.json keeps: a folder with another one is not continued.
nlohmann::json description(const Study& study);

// Executes the runs in folder/runs/NAME, one per thread of the pool; a run has all threads where it is the only one, or
// where the study's runs fill a GPU. A run that did not get enough memory on a GPU continues from its last checkpoint
// after the others, with at most half as many runs side by side. An entry is kept in its folder's result.json, and a
// run that has one is not executed again: no other file of it is needed. Throws Error where two runs have one name, and
// IoError(content) for a result.json that is not the entry of this run. Returns the entries, or nothing where it was
// stopped.
std::optional<std::vector<nlohmann::ordered_json>> run_study(const Study& study, const std::filesystem::path& folder,
                                                             ThreadPool& pool, const StudyEvents& events,
                                                             const Device& device = {});

// Returns results.json: {"schema", "study", "settings", "command", "environment", "scores", "runs"}.
nlohmann::ordered_json results_of(const std::string& study, const nlohmann::json& settings, const Outcome& outcome,
                                  const nlohmann::ordered_json& scores);

// Returns a number as JSON; null if it is not finite.
nlohmann::json number_or_null(double value);

}  // namespace efla::experiments
