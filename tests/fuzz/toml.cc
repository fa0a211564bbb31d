#include "efla/io/toml.h"

#include <nlohmann/json.hpp>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void toml(io::ByteView bytes) {
  const std::string text(bytes.begin(), bytes.end());
  accepts([&] { require(io::parse_toml(text, "config.toml").is_object(), "a table"); }, bytes.size());
}

}  // namespace efla::fuzz
