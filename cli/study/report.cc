// efla report: a page that compares training runs of language models.
#include <fmt/core.h>

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/support/output_file.h"
#include "efla/base/error.h"
#include "efla/io/file.h"
#include "experiments/common/lm_runs.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

// Returns the last part of each run's path, or the whole path if another run has the same last part.
std::vector<std::string> names_of(const std::vector<std::string>& runs) {
  std::vector<std::string> names;
  for (const auto& run : runs) {
    const auto path = fs::absolute(run).lexically_normal();
    names.push_back((path.has_filename() ? path : path.parent_path()).filename().string());  // the path may end in "/"
  }
  if (std::set<std::string>(names.begin(), names.end()).size() < names.size()) return runs;
  return names;
}

void require_each_once(const std::vector<std::string>& runs) {
  std::set<fs::path> folders;
  for (const auto& run : runs) {
    std::error_code missing;  // read_lm_run reports it
    const auto folder = fs::canonical(run, missing);
    if (!missing && !folders.insert(folder).second)
      throw Error("report", "RUN", "'" + run + "' twice", "each run once");
  }
}

void write_report(const std::vector<std::string>& runs, const std::string& out) {
  require_each_once(runs);
  check_output_file("report", "--out", out);
  for (const auto& run : runs) {
    std::error_code missing;  // read_lm_run reports it
    for (const auto& file : fs::directory_iterator(run, missing)) {
      if (file.path().extension() != ".html") check_output_file("report", "--out", out, file.path());
    }
  }
  const auto names = names_of(runs);
  std::vector<experiments::LmRunRecord> records;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    records.push_back(experiments::read_lm_run(names[i], runs[i]));
  }
  io::write_file_atomically(out, report::render(experiments::compare_lm_runs(records)));
  fmt::print("report: {}\n", out);
}

}  // namespace

void add_report(CLI::App& program) {
  auto* command = program.add_subcommand("report", "A page that compares training runs of language models");
  auto runs = std::make_shared<std::vector<std::string>>();
  auto out = std::make_shared<std::string>("report.html");
  command->add_option("RUN", *runs, "Folders of runs of efla train lm")->required()->take_all();
  command->add_option("--out", *out, "HTML file, complete in itself")->capture_default_str();
  command->callback([=] { write_report(*runs, *out); });
}

}  // namespace efla::cli
