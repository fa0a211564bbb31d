#include "experiments/common/study.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <numeric>
#include <set>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int kSchema = 2;  // of results.json
constexpr const char* kResultFile = "result.json";

// Executes runs side by side and keeps their entries.
class Runner {
 public:
  Runner(const Study& study, const fs::path& folder, ThreadPool& pool, const StudyEvents& events, const Device& device)
      : study_(study), folder_(folder), pool_(pool), events_(events), device_(device) {}

  // Returns false where it was stopped.
  bool execute(const std::vector<StudyRun>& runs) {
    for (const auto& run : runs) {  // before hours of training
      if (!names_.insert(run.name).second) {
        throw Error("reproduce " + study_.name, "runs", "two named " + run.name,
                    "settings of which no two are equal in six digits");
      }
      if (const auto kept = folder_ / run.name / kResultFile; fs::exists(kept)) kept_entry(kept, run.name);
    }
    const std::size_t first = entries_.size();
    entries_.resize(first + runs.size());
    shares_.resize(first + runs.size());
    std::vector<std::size_t> left(runs.size());
    std::iota(left.begin(), left.end(), 0);
    int at_once = study_.fills_gpu && !device_.is_cpu() ? 1 : pool_.threads();
    while (!left.empty() && !events_.stop()) {
      at_once = std::min(at_once, static_cast<int>(left.size()));
      left = execute(runs, first, left, at_once);
      at_once = std::max(at_once / 2, 1);
    }
    return std::none_of(entries_.begin(), entries_.end(), [](const ordered_json& entry) { return entry.is_null(); });
  }

  const std::vector<ordered_json>& entries() const { return entries_; }

 private:
  // Executes the runs of these numbers, at most `at_once` side by side. Returns the numbers of the runs for which the
  // GPU had too little memory beside the others.
  std::vector<std::size_t> execute(const std::vector<StudyRun>& runs, std::size_t first,
                                   const std::vector<std::size_t>& numbers, int at_once) {
    if (at_once == 1) {
      for (std::size_t i = 0; i < numbers.size() && !events_.stop(); ++i) execute(runs[numbers[i]], first + numbers[i]);
      return {};
    }
    std::atomic<std::size_t> next = 0;
    std::vector<std::size_t> without_memory;
    const auto execute_until_none_is_left = [&](std::int64_t, int) {
      for (std::size_t i = next++; i < numbers.size() && !events_.stop(); i = next++) {
        try {
          execute(runs[numbers[i]], first + numbers[i]);
        } catch (const std::exception& error) {
          if (!says_no_gpu_memory(error.what())) {
            next = numbers.size();
            throw;
          }
          const std::lock_guard lock(mutex_);
          without_memory.push_back(numbers[i]);
          events_.line(runs[numbers[i]].name +
                       ": too little memory on the GPU beside other runs; continues after them");
        }
      }
    };
    pool_.run(at_once, execute_until_none_is_left);
    return without_memory;
  }

  ordered_json kept_entry(const fs::path& file, const std::string& name) const {
    const json content = io::read_json(file);
    const io::Fields entry(content, io::refuse_in_file(file.string()));
    if (entry.find<std::string>("name").value_or(name) != name) entry.refuse("name", '"' + name + "\", as its folder");
    if (study_.check) study_.check(entry);
    return content;
  }

  void execute(const StudyRun& run, std::size_t i) {
    const fs::path folder = folder_ / run.name, kept = folder / kResultFile;
    std::optional<ordered_json> entry;
    if (fs::exists(kept)) {
      entry = kept_entry(kept, run.name);
      io::remove_stale_temporaries(folder);
      io::remove_stale_lock(folder);
    } else {
      fs::create_directories(folder);
      // Other commands may write this folder too, for example `efla train smnist --resume`.
      const io::FolderLock lock(folder, "reproduce " + study_.name, "out");
      const RunContext context{pool_, device_, events_.stop, [&](double share, const std::string& text) {
                                 const std::lock_guard lock(mutex_);
                                 shares_[i] = share;
                                 const double sum = std::accumulate(shares_.begin(), shares_.end(), 0.0);
                                 events_.progress(sum / static_cast<double>(shares_.size()), run.name + ": " + text);
                               }};
      entry = run.execute(folder, context);
      if (!entry) return;
      io::write_file_atomically(kept, entry->dump(2) + "\n");
    }
    if (run.tidy) run.tidy(folder);
    const std::lock_guard lock(mutex_);
    shares_[i] = 1.0;
    entries_[i] = *entry;
    events_.line(std::to_string(++finished_) + " of " + std::to_string(entries_.size()) + ": " + run.name + ": " +
                 study_.brief(*entry));
  }

  const Study& study_;
  fs::path folder_;
  ThreadPool& pool_;
  const StudyEvents& events_;
  Device device_;
  std::set<std::string> names_;  // of all runs
  std::mutex mutex_;
  std::vector<ordered_json> entries_;
  std::vector<double> shares_;
  std::size_t finished_ = 0;
};

}  // namespace

json description(const Study& study) {
  json description{{"study", study.name}, {"settings", study.settings}};
  for (const auto& run : study.runs) {
    if (!run.description.is_null()) description["runs"][run.name] = run.description;
  }
  return description;
}

std::optional<std::vector<ordered_json>> run_study(const Study& study, const fs::path& folder, ThreadPool& pool,
                                                   const StudyEvents& events, const Device& device) {
  Runner runner(study, folder / "runs", pool, events, device);
  if (!runner.execute(study.runs)) return {};
  if (study.more && !runner.execute(study.more(runner.entries()))) return {};
  return runner.entries();
}

ordered_json results_of(const std::string& study, const json& settings, const Outcome& outcome,
                        const ordered_json& scores) {
  return {{"schema", kSchema},
          {"study", study},
          {"settings", settings},
          {"command", outcome.command},
          {"environment", outcome.environment},
          {"scores", scores},
          {"runs", outcome.runs}};
}

json number_or_null(double value) { return std::isfinite(value) ? json(value) : json(); }

}  // namespace efla::experiments
