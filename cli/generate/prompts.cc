#include "cli/generate/prompts.h"

#include <algorithm>
#include <string_view>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/json.h"

namespace efla::cli {
namespace {

// Returns the prompt of a line. where: the file and the line, for messages.
std::string prompt_of(std::string_view line, const std::string& where, std::size_t offset) {
  const auto object = io::parse_json_line(line, where, offset);
  return io::Fields(object, io::refuse_in_file(where, "", static_cast<std::int64_t>(offset)))
      .get<std::string>("prompt");
}

// Returns a text without the blank lines at its end.
std::string_view without_last_blanks(std::string_view text) {
  const auto last = text.find_last_not_of(" \t\r\n");
  return last == std::string_view::npos ? "" : text.substr(0, text.find('\n', last));
}

}  // namespace

std::vector<std::string> read_prompts(const std::filesystem::path& path) {
  const auto bytes = io::read_file(path);
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto where = [&](auto line) { return path.string() + ", line " + std::to_string(line); };
  if (const auto valid = utf8_prefix(all); valid != all.size()) {
    io::fail_at(where(1 + std::count(all.begin(), all.begin() + valid, '\n')), valid, "not UTF-8");
  }
  const auto text = without_last_blanks(all);
  const bool json = path.extension() == ".jsonl" || path.extension() == ".ndjson";
  std::vector<std::string> prompts;
  for (std::size_t begin = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    auto line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    prompts.push_back(json ? prompt_of(line, where(prompts.size() + 1), begin) : std::string(line));
    begin = end + 1;
  }
  if (prompts.empty()) {
    throw Error("generate", "--prompts", path.string() + ", which has only blank lines", "one prompt per line");
  }
  return prompts;
}

}  // namespace efla::cli
