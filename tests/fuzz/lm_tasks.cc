#include "efla/data/lm_tasks/task.h"

#include <array>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

// A task and its file.
struct File {
  const char *task, *name;
};

constexpr std::array<File, 10> kFiles{{{"arc_challenge", "arc-challenge-test.jsonl"},
                                       {"arc_easy", "arc-easy-test.jsonl"},
                                       {"boolq", "boolq-dev.jsonl"},
                                       {"hellaswag", "hellaswag-val.jsonl"},
                                       {"lambada", "lambada-openai-test.jsonl"},
                                       {"openbookqa", "openbookqa-test.jsonl"},
                                       {"piqa", "piqa-valid.jsonl"},
                                       {"sciq", "sciq-test.jsonl"},
                                       {"wikitext", "wikitext-2.test.tokens"},
                                       {"winogrande", "winogrande-dev.jsonl"}}};

}  // namespace

void lm_tasks(io::ByteView bytes) {
  static const ScratchFolder folder;
  if (bytes.empty()) return;
  const File& file = kFiles[static_cast<std::size_t>(bytes[0]) % kFiles.size()];
  folder.write(file.name, bytes.subspan(1));
  folder.write("piqa-valid-labels.lst", io::as_bytes(std::string_view("0\n1\n0\n")));
  accepts(
      [&] {
        const auto task = data::load_lm_task(file.task, folder.path());
        const auto* examples = std::get_if<std::vector<data::MultipleChoice>>(&task.examples);
        if (examples == nullptr) return;
        for (const auto& example : *examples) {
          require(example.gold < example.choices.size(), "a right answer that is among the choices");
        }
      },
      SIZE_MAX);  // offsets count unpacked bytes
}

}  // namespace efla::fuzz
