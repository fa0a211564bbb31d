#include "efla/data/documents.h"

#include "efla/base/utf8.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

void read(const std::filesystem::path& path) {
  static const auto tokenizer = data::load_tokenizer("bytes");
  data::DocumentReader reader({path}, {}, *tokenizer);
  std::string text;
  // Offsets count unpacked bytes.
  accepts(
      [&] {
        for (data::DocumentPart part; reader.next(part);) {
          require(part.first == text.empty(), "a document's first part first");
          text += part.text;
          if (!part.last) continue;
          require(!text.empty() && utf8_prefix(text) == text.size(), "documents that are UTF-8");
          text.clear();
        }
      },
      SIZE_MAX);
}

}  // namespace

void documents(io::ByteView bytes) {
  static const ScratchFolder folder;
  read(folder.write("text", bytes));
  read(folder.write("lines.jsonl", bytes));
}

}  // namespace efla::fuzz
