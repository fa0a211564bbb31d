#include "cli/generate/prompts.h"

#include <string_view>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/json.h"

namespace efla::cli {
namespace {

std::string prompt_of(std::string_view line, const std::filesystem::path& path, std::size_t offset) {
  const auto object = io::parse_json(io::as_bytes(line), path.string(), offset);
  return io::Fields(object, io::refuse_in_file(path.string(), "", static_cast<std::int64_t>(offset)))
      .get<std::string>("prompt");
}

}  // namespace

std::vector<std::string> read_prompts(const std::filesystem::path& path) {
  const auto bytes = io::read_file(path);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (const auto valid = utf8_prefix(text); valid != text.size()) {
    io::fail_at(path, valid, "not UTF-8");
  }
  const bool json = path.extension() == ".jsonl" || path.extension() == ".ndjson";
  std::vector<std::string> prompts;
  for (std::size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    auto line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    prompts.push_back(json ? prompt_of(line, path, begin) : std::string(line));
    begin = end + 1;
  }
  if (prompts.empty()) throw Error("generate", "--prompts", path.string() + ", which is empty", "one prompt per line");
  return prompts;
}

}  // namespace efla::cli
