#include "efla/data/lm_tasks/record.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "efla/base/error.h"
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
      throw IoError(IoError::Kind::content, path.string(), -1,
                    fmt::format("unpacks to more than {} bytes", kLargestFile));
    }
    text.append(reinterpret_cast<const char*>(part.data()), size);
  }
  return text;
}

std::vector<std::string_view> split_lines(std::string_view text, const std::string& path) {
  if (text.empty()) throw IoError(IoError::Kind::content, path, -1, "is empty");
  if (text.ends_with('\n')) text.remove_suffix(1);
  std::vector<std::string_view> lines;
  for (;;) {
    const auto end = text.find('\n');
    lines.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return lines;
    text.remove_prefix(end + 1);
  }
}

void fail_at_line(const std::string& path, std::int64_t line, const std::string& what) {
  throw IoError(IoError::Kind::content, path, -1, fmt::format("line {}: {}", line, what));
}

Record::Record(std::string path, std::int64_t line, std::string_view text) : path_(std::move(path)), line_(line) {
  try {
    value_ = io::parse_json(io::as_bytes(text), path_);
  } catch (const IoError& error) {
    fail_at_line(path_, line_, fmt::format("not JSON, from byte {} of the line on", error.offset()));
  }
  if (!value_.is_object()) fail_at_line(path_, line_, "not a JSON object");
}

Record::Record(const Record& outer, const std::string& name, nlohmann::json value)
    : path_(outer.path_), line_(outer.line_), inside_(outer.inside_ + name + "."), value_(std::move(value)) {}

std::string Record::text(const char* field, bool may_be_empty) const {
  return checked_text(at(field), field, may_be_empty);
}

bool Record::flag(const char* field) const {
  const auto& value = at(field);
  if (!value.is_boolean()) fail(field, fmt::format("is {}, expected true or false", value.dump()));
  return value.get<bool>();
}

std::int64_t Record::integer(const char* field) const {
  const auto& value = at(field);
  if (!value.is_number_integer()) fail(field, fmt::format("is {}, expected a whole number", value.dump()));
  return value.get<std::int64_t>();
}

std::vector<std::string> Record::texts(const char* field) const {
  const auto& value = at(field);
  if (!value.is_array() || value.empty()) fail(field, "is no list of texts");
  std::vector<std::string> result;
  for (const auto& element : value) {
    result.push_back(checked_text(element, fmt::format("{}[{}]", field, result.size()), false));
  }
  return result;
}

Record Record::object(const char* field) const {
  const auto& value = at(field);
  if (!value.is_object()) fail(field, "is no object");
  return {*this, field, value};
}

std::vector<Record> Record::objects(const char* field) const {
  const auto& value = at(field);
  if (!value.is_array() || value.empty()) fail(field, "is no list of objects");
  std::vector<Record> result;
  for (const auto& element : value) {
    const auto name = fmt::format("{}[{}]", field, result.size());
    if (!element.is_object()) fail(name.c_str(), "is no object");
    result.push_back(Record(*this, name, element));
  }
  return result;
}

std::size_t Record::place(const std::string& label, const std::vector<std::string>& labels, const char* field) const {
  const auto found = std::find(labels.begin(), labels.end(), label);
  if (found == labels.end()) fail(field, fmt::format("is '{}', expected one of {}", label, fmt::join(labels, ", ")));
  return static_cast<std::size_t>(found - labels.begin());
}

void Record::fail(const char* field, const std::string& what) const {
  fail_at_line(path_, line_, fmt::format("'{}{}' {}", inside_, field, what));
}

const nlohmann::json& Record::at(const char* field) const {
  const auto found = value_.find(field);
  if (found == value_.end()) fail(field, "is missing");
  return *found;
}

std::string Record::checked_text(const nlohmann::json& value, const std::string& field, bool may_be_empty) const {
  if (!value.is_string()) fail(field.c_str(), "is no text");
  auto text = value.get<std::string>();
  if (text.empty() && !may_be_empty) fail(field.c_str(), "is empty");
  return text;
}

}  // namespace efla::data
