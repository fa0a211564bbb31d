#include "efla/io/json.h"

#include <fcntl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "efla/io/content_error.h"
#include "efla/io/descriptor.h"

namespace efla::io {
namespace {

// Returns the size of a text up to and including its last newline.
std::size_t whole_lines(ByteView text) {
  return static_cast<std::size_t>(text.rend() - std::find(text.rbegin(), text.rend(), '\n'));
}

std::optional<Difference> difference_at(const std::string& path, const nlohmann::json& asked,
                                        const nlohmann::json& found) {
  if (asked.is_object() && found.is_object()) {
    const auto below = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
    for (const auto& [key, value] : asked.items()) {
      if (auto difference = difference_at(below(key), value, found.value(key, nlohmann::json()))) return difference;
    }
    for (const auto& [key, value] : found.items()) {
      if (asked.contains(key)) continue;
      if (auto difference = difference_at(below(key), nlohmann::json(), value)) return difference;
    }
    return std::nullopt;
  }
  if (asked == found) return std::nullopt;
  const auto shown = [](const nlohmann::json& value) { return value.is_null() ? "nothing" : value.dump(); };
  return Difference{path, shown(asked), shown(found)};
}

}  // namespace

nlohmann::json parse_json_line(std::string_view line, const std::string& path, std::size_t start) {
  try {
    return parse_json(as_bytes(line), path, start);
  } catch (const IoError& error) {
    const auto end = start + line.find_last_not_of(" \t\r") + 1;
    if (end == start || error.offset() < static_cast<std::int64_t>(end)) throw;
    fail_at(path, end, "not JSON on one line, expected one object per line");
  }
}

nlohmann::json read_json(const std::filesystem::path& path) {
  const auto text = read_file(path);
  return parse_json(text, path.string());
}

std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path) {
  const auto text = read_file(path);
  std::vector<nlohmann::json> values;
  const auto end = whole_lines(text);
  for (std::size_t start = 0; start < end;) {
    const auto newline = std::find(text.begin() + static_cast<std::ptrdiff_t>(start), text.end(), '\n');
    const auto stop = static_cast<std::size_t>(newline - text.begin());
    values.push_back(parse_json(ByteView(text).subspan(start, stop - start), path.string(), start));
    start = stop + 1;
  }
  return values;
}

std::string to_json_line(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string to_json_text(const nlohmann::ordered_json& value) {
  return value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string shown(const nlohmann::json& value) {
  const bool has_no_json = value.is_number_float() && !std::isfinite(value.get<double>());
  return has_no_json ? std::to_string(value.get<double>()) : value.dump();
}

std::optional<Difference> first_difference(const nlohmann::json& asked, const nlohmann::json& found) {
  return difference_at("", asked, found);
}

void require_same(const nlohmann::json& asked, const nlohmann::json& found, std::string_view operation,
                  std::string_view where) {
  if (const auto difference = first_difference(asked, found)) {
    throw Error(std::string(operation), difference->field, difference->asked,
                difference->found + " as in " + std::string(where));
  }
}

JsonLinesWriter::JsonLinesWriter(const std::filesystem::path& path) : path_(path) {
  Descriptor file(::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (file.get() < 0) throw system_error(path_, "open it for writing");
  const auto text = read_file(path);
  const auto keep = whole_lines(text);
  if (keep < text.size() && ::ftruncate(file.get(), static_cast<off_t>(keep)) != 0) {
    throw system_error(path_, "remove its truncated last line");
  }
  descriptor_ = file.release();
}

JsonLinesWriter::~JsonLinesWriter() { ::close(descriptor_); }

void JsonLinesWriter::write(const nlohmann::ordered_json& value) {
  write_all(descriptor_, as_bytes(to_json_line(value) + "\n"), path_);
}

void JsonLinesWriter::sync() {
  if (::fsync(descriptor_) != 0) throw system_error(path_, "fsync it");
}

}  // namespace efla::io
