#include "efla/io/json.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

#include <algorithm>

namespace efla::fuzz {

void json_lines(io::ByteView bytes) {
  static const ScratchFolder folder;
  const auto path = folder.write("metrics.jsonl", bytes);
  std::vector<nlohmann::json> values;
  if (!accepts([&] { values = io::read_json_lines(path); }, bytes.size())) return;
  io::JsonLinesWriter(path).write({{"step", 1}});
  const auto more = io::read_json_lines(path);
  require(more.size() == values.size() + 1 && more.back() == nlohmann::json{{"step", 1}},
          "one more value after it was appended");
  require(std::equal(values.begin(), values.end(), more.begin()), "the values before it as they were");
  for (const auto& value : values) {
    const auto line = io::to_json_line(value);
    require(line.find('\n') == std::string::npos, "a value on one line");
    require(nlohmann::json::parse(line) == value, "a value that reads back as it was written");
  }
}

}  // namespace efla::fuzz
