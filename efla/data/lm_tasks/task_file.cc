#include "efla/data/lm_tasks/task_file.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/lm_tasks/text.h"
#include "efla/io/content_error.h"
#include "efla/io/json.h"
#include "efla/io/unpack.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kLargestFile = std::size_t{1} << 30;

}  // namespace

fs::path find_task_file(const fs::path& folder, std::initializer_list<const char*> names) {
  std::error_code error;
  for (const char* name : names) {
    for (const char* packing : {"", ".gz", ".xz", ".zst"}) {
      const auto path = folder / fmt::format("{}{}", name, packing);
      if (fs::exists(path, error)) return path;
    }
  }
  const bool is_folder = fs::is_directory(folder, error);
  throw IoError(IoError::Kind::missing, folder.string(), -1,
                is_folder ? fmt::format("holds no {}, nor one with .gz, .xz or .zst", fmt::join(names, " or "))
                          : "there is no such folder");
}

std::string read_task_file(const fs::path& path) {
  io::UnpackedFile file(path);
  std::string text;
  std::array<std::uint8_t, 1 << 16> part{};
  while (const auto size = file.read(part)) {
    if (text.size() + size > kLargestFile) {
      io::fail_in(path, fmt::format("unpacks to more than {} bytes", kLargestFile));
    }
    text.append(reinterpret_cast<const char*>(part.data()), size);
  }
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  return replace_all(text, "\r\n", "\n");
}

std::vector<TaskLine> split_lines(std::string_view text, const std::string& path) {
  std::vector<TaskLine> lines;
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const auto line = text.substr(0, text.find('\n'));
    if (!strip(line).empty()) lines.push_back({number, line});
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  if (lines.empty()) io::fail_in(path, "is empty");
  return lines;
}

nlohmann::json parse_line(const std::string& path, const TaskLine& line) {
  try {
    return io::parse_json(io::as_bytes(line.text), path);
  } catch (const IoError& error) {
    io::fail_at_line(
        path, line.number,
        fmt::format("not JSON, from byte {} of the line on; expected one object per line", error.offset()));
  }
}

std::string text_of(const io::Fields& record, const char* field) {
  auto text = record.get<std::string>(field);
  if (text.empty()) record.refuse(field, "a text that is not empty");
  return text;
}

std::vector<std::string> texts_of(const io::Fields& record, const char* field) {
  auto texts = record.get<std::vector<std::string>>(field);
  if (texts.empty()) record.refuse(field, "a list that is not empty");
  const auto empty = std::find(texts.begin(), texts.end(), "");
  if (empty != texts.end()) {
    record.refuse(field, fmt::format("a text that is not empty at [{}]", empty - texts.begin()));
  }
  return texts;
}

std::size_t place_of(const io::Fields& record, const char* field, std::string_view label,
                     const std::vector<std::string>& labels) {
  const auto found = std::find(labels.begin(), labels.end(), label);
  if (found == labels.end()) record.refuse(field, fmt::format("one of {}", fmt::join(labels, ", ")));
  return static_cast<std::size_t>(found - labels.begin());
}

}  // namespace efla::data
