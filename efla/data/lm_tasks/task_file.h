// Files of JSON lines, one example per line. Errors are IoError(content) and name the file, the line and the field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/fields.h"

namespace efla::data {

// Returns the first of these names that exists in the folder, plain or with .gz, .xz or .zst. Throws IoError(missing).
std::filesystem::path find_task_file(const std::filesystem::path& folder, std::initializer_list<const char*> names);

// Returns the unpacked content of a file without a byte-order mark, and with \n for \r\n. Throws if it is larger than
// 1 GiB.
std::string read_task_file(const std::filesystem::path& path);

struct TaskLine {
  std::int64_t number = 0;  // in the file, from 1
  std::string_view text;
};

// Returns the lines of a text that are not blank; the last one may lack its newline. path is for messages. Throws if
// there is none.
std::vector<TaskLine> split_lines(std::string_view text, const std::string& path);

// Parses a line of a file.
nlohmann::json parse_line(const std::string& path, const TaskLine& line);

// Return the text or the texts of a field, which must not be empty.
std::string text_of(const io::Fields& record, const char* field);
std::vector<std::string> texts_of(const io::Fields& record, const char* field);

// Returns the index of a label in labels. Throws if it is not there, and names the field.
std::size_t place_of(const io::Fields& record, const char* field, std::string_view label,
                     const std::vector<std::string>& labels);

}  // namespace efla::data
