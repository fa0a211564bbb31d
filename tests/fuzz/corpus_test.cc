// Every input in corpus/, the seeds and what the fuzzers found, through the functions that are fuzzed.
#include <gtest/gtest.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "efla/io/file.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

struct Target {
  const char* name;
  void (*run)(io::ByteView);
};

void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

class Corpus : public testing::TestWithParam<Target> {};

TEST_P(Corpus, HoldsWhatReadersPromise) {
  const auto folder = std::filesystem::path(EFLA_SOURCE_DIR) / "tests/fuzz/corpus" / GetParam().name;
  int inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto bytes = io::read_file(entry.path());
    EXPECT_NO_THROW(GetParam().run(bytes)) << entry.path();
    ++inputs;
  }
  EXPECT_GT(inputs, 0) << "no inputs in " << folder;
}

INSTANTIATE_TEST_SUITE_P(
    All, Corpus,
    testing::Values(Target{"safetensors", safetensors}, Target{"gguf", gguf}, Target{"gzip", gzip}, Target{"idx", idx},
                    Target{"images", images}, Target{"json_lines", json_lines}, Target{"lm_run", lm_run},
                    Target{"unpack", unpack}, Target{"token_shard", token_shard}, Target{"token_index", token_index},
                    Target{"sentencepiece", sentencepiece}, Target{"tokenizer_json", tokenizer_json},
                    Target{"documents", documents}, Target{"lm_tasks", lm_tasks}, Target{"toml", toml},
                    Target{"http_requests", http_requests}, Target{"api_requests", api_requests},
                    Target{"replies", replies}, Target{"schemas", schemas}, Target{"session", session},
                    Target{"family_config", family_config}, Target{"weights_index", weights_index}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace efla::fuzz
