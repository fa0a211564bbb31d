#include <string>

#include "efla/data/tokenizers/json_tokenizer.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/try_tokenizer.h"

namespace efla::fuzz {

void tokenizer_json(io::ByteView bytes) {
  try_tokenizer(bytes,
                [](io::ByteView given, const std::string& path) { return data::make_json_tokenizer(given, path); });
}

}  // namespace efla::fuzz
