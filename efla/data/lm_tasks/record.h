// Files of JSON lines, one example per line. Errors are IoError(content) and name the file, the line and the field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace efla::data {

// Returns the first of these names that exists in the folder, plain or with .gz, .xz or .zst. Throws IoError(missing).
std::filesystem::path find_task_file(const std::filesystem::path& folder, std::initializer_list<const char*> names);

// Returns the content of a file, unpacked; at most 1 GiB.
std::string read_task_file(const std::filesystem::path& path);

// Returns the lines of a text; the last one may lack its newline. path is for messages. Throws if there is none.
std::vector<std::string_view> split_lines(std::string_view text, const std::string& path);

[[noreturn]] void fail_at_line(const std::string& path, std::int64_t line, const std::string& what);

// The object on a line, or an object inside of it. Every function throws if the field is missing or of another type.
class Record {
 public:
  // line counts from 1.
  Record(std::string path, std::int64_t line, std::string_view text);

  bool has(const char* field) const { return value_.contains(field); }
  // Returns a string, which must not be empty unless may_be_empty.
  std::string text(const char* field, bool may_be_empty = false) const;
  bool flag(const char* field) const;
  std::int64_t integer(const char* field) const;
  std::vector<std::string> texts(const char* field) const;  // each not empty
  Record object(const char* field) const;
  std::vector<Record> objects(const char* field) const;

  // Returns the place of a choice in labels. Throws if it is not there, and names the field that it came from.
  std::size_t place(const std::string& label, const std::vector<std::string>& labels, const char* field) const;

  // "line 3: 'question.stem' <what>"
  [[noreturn]] void fail(const char* field, const std::string& what) const;

 private:
  Record(const Record& outer, const std::string& name, nlohmann::json value);

  const nlohmann::json& at(const char* field) const;
  std::string checked_text(const nlohmann::json& value, const std::string& field, bool may_be_empty) const;

  std::string path_;
  std::int64_t line_;
  std::string inside_;  // "question." for an object inside of the line's object
  nlohmann::json value_;
};

}  // namespace efla::data
