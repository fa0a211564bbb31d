// JSON files and JSON lines (one value a line, as metrics are kept).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/file.h"

namespace efla::io {

// The value in a text that begins at byte `start` of a file. Throws IoError(content) with the byte offset where it is
// not JSON, nested deeper than 256, or has a number beyond float64.
nlohmann::json parse_json(ByteView text, const std::string& path, std::size_t start = 0);

// The value in a file. Throws IoError(content) with the byte offset where it is not JSON.
nlohmann::json read_json(const std::filesystem::path& path);

// The values in a file of JSON lines, in order. A last line without its newline was cut short by a crash: left out.
std::vector<nlohmann::json> read_json_lines(const std::filesystem::path& path);

// The value on one line without a newline. JSON has no NaN and no infinity: they become null.
std::string to_json_line(const nlohmann::ordered_json& value);

// A value in a message: as JSON, but nan and inf by their names.
std::string shown(const nlohmann::json& value);

// Appends lines to a file, each in one write that is out of the process when it returns. On opening, a last line that
// was cut short is cut off.
class JsonLinesWriter {
 public:
  explicit JsonLinesWriter(const std::filesystem::path& path);
  ~JsonLinesWriter();
  JsonLinesWriter(const JsonLinesWriter&) = delete;
  JsonLinesWriter& operator=(const JsonLinesWriter&) = delete;

  void write(const nlohmann::ordered_json& value);

  // Brings what was written to the disk.
  void sync();

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace efla::io
