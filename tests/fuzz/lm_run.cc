#include "efla/io/json.h"
#include "experiments/common/lm_runs.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void lm_run(io::ByteView bytes) {
  static const ScratchFolder folder;
  const auto path = folder.write("metrics.jsonl", bytes);
  experiments::LmRunRecord record{"run", {}, {}};
  if (!accepts([&] { record.metrics = io::read_json_lines(path); }, bytes.size())) return;
  if (!record.metrics.empty()) record.run = record.metrics.front();
  const auto report = experiments::compare_lm_runs({record, record});
  require(report.sections.size() == 5, "five sections");
  require(!report::render(report).empty(), "a page");
}

}  // namespace efla::fuzz
