#include "efla/io/json.h"
#include "efla/report/smnist_study.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void results(io::ByteView bytes) {
  static const ScratchFolder folder;
  const auto path = folder.write("results.json", bytes);
  nlohmann::json value;
  if (!accepts([&] { value = io::read_json(path); }, bytes.size())) return;
  const auto study = report::read_study(value);
  require(study.headline.size() == study.mixers.size(), "a headline a mixer");
}

}  // namespace efla::fuzz
