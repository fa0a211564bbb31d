#include <algorithm>

#include "experiments/common/lm_runs.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

// The first line is run.json, the others are metrics.jsonl.
void lm_run(io::ByteView bytes) {
  static const ScratchFolder folder;
  const auto line = static_cast<std::size_t>(std::find(bytes.begin(), bytes.end(), '\n') - bytes.begin());
  folder.write("run.json", bytes.first(line));
  folder.write("metrics.jsonl", bytes.subspan(std::min(line + 1, bytes.size())));
  experiments::LmRunRecord record;
  if (!accepts([&] { record = experiments::read_lm_run("run", folder.path()); }, bytes.size())) return;
  const auto report = experiments::compare_lm_runs({record, record});
  require(report.sections.size() == 5, "five sections");
  require(!report::render(report).empty(), "a page");
}

}  // namespace efla::fuzz
