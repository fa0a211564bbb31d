// The parts that every report's page is made of.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla::report {

// What goes into the page: the body, and the charts that its script draws.
struct Body {
  std::string html;
  nlohmann::json charts = nlohmann::json::array();
};

struct Column {
  std::string name;
  bool number;
};

// A table that scrolls in its box where it is too wide. Cells are HTML; the first column heads the rows.
std::string table(const std::string& label, const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows);

std::string section(const std::string& id, const std::string& heading, const std::string& lead,
                    const std::string& content);

// What an object has under a key, as text; "" and NaN where it has nothing of the kind.
std::string string_of(const nlohmann::json& value);
std::string text_of(const nlohmann::json& object, const char* key);
double number_of(const nlohmann::json& object, const char* key);

std::string joined(const std::vector<std::string>& parts, const std::string& separator);

// The entries of an environment as results record it, as a list.
std::string environment_html(const nlohmann::json& environment);

// The whole page: the command that makes such pages, title, what stands under it, body, and the results for whoever
// reads the page by a program.
std::string page(const std::string& command, const std::string& title, const std::string& preamble, const Body& body,
                 const nlohmann::json& results);

}  // namespace efla::report
