// JSON files and JSON lines (one value per line, the format of metrics).
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/file.h"

namespace efla::io {

// Parses a text that starts at byte `start` of a file, in a time that is linear in its size. Throws IoError(content)
// with the byte offset if the text is not JSON, is nested deeper than 256 levels, or has a number beyond float64.
nlohmann::json parse_json(ByteView text, const std::string& path, std::size_t start = 0);

// Parses one line of a user's JSON lines as parse_json does. Throws IoError(content) that says so if the value does not
// end on the line.
nlohmann::json parse_json_line(std::string_view line, const std::string& path, std::size_t start);

// A JSON value whose destructor allocates no memory. The destructor of nlohmann::json allocates memory for the values
// inside of a value, and ends the process if there is none.
class JsonDocument {
 public:
  // Called before memory is taken (bytes > 0) and after it is freed (bytes < 0), in steps of about 64 KiB. What it
  // throws for bytes > 0 ends the parsing.
  using Hold = std::function<void(std::ptrdiff_t bytes)>;

  // Parses a text as parse_json does. Reports the memory of the value to `hold`, and while it parses also the memory
  // of the longest text in it.
  explicit JsonDocument(ByteView text, const std::string& path, std::size_t start = 0, Hold hold = {});
  ~JsonDocument();
  JsonDocument(const JsonDocument&) = delete;
  JsonDocument& operator=(const JsonDocument&) = delete;

  operator const nlohmann::json&() const { return value_; }
  std::ptrdiff_t bytes() const { return held_; }  // of memory
  nlohmann::json take() { return std::move(value_); }

 private:
  const Hold hold_;
  nlohmann::json value_;
  std::ptrdiff_t held_ = 0;
};

// Reads the value in a file. Throws IoError(content) with the byte offset if the file is not JSON.
nlohmann::json read_json(const std::filesystem::path& path);

// Reads the values in a file of JSON lines, in order. Skips a last line without newline, which a crash has truncated.
std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path);

// Returns a value as one line without newline. NaN and infinity become null because JSON has neither.
std::string to_json_line(const nlohmann::ordered_json& value);

// Returns a value as indented lines. to_json_line and to_json_text replace bytes that are not UTF-8, which names of
// files may have.
std::string to_json_text(const nlohmann::ordered_json& value);

// Returns a value for a message: as JSON, except that nan and inf are shown by name.
std::string shown(const nlohmann::json& value);

// A field of two objects (by its path, as in "model.hidden") with both values as text, "nothing" for a missing one.
struct Difference {
  std::string field, asked, found;
};

// Returns the first field whose values differ. A field that only one of the objects has differs, unless it is null.
std::optional<Difference> first_difference(const nlohmann::json& asked, const nlohmann::json& found);

// Throws Error with the first difference; `operation` and `where` (the file with `found`) are parts of its message.
void require_same(const nlohmann::json& asked, const nlohmann::json& found, std::string_view operation,
                  std::string_view where);

// Appends lines to a file. Each line is written in one call before the function returns. The constructor removes a last
// line that was truncated.
class JsonLinesWriter {
 public:
  explicit JsonLinesWriter(const std::filesystem::path& path);
  ~JsonLinesWriter();
  JsonLinesWriter(const JsonLinesWriter&) = delete;
  JsonLinesWriter& operator=(const JsonLinesWriter&) = delete;

  void write(const nlohmann::ordered_json& value);

  // Calls fsync for the lines written so far.
  void sync();

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace efla::io
