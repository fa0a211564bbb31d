#include "efla/report/table.h"

#include <algorithm>

#include "efla/report/html.h"

namespace efla::report {
namespace {

// Returns how many columns of a terminal a text takes: its UTF-8 characters.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string table_html(const Table& table) {
  std::string html =
      "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"" + escape(table.title) + "\"><table><thead>";
  const auto cell = [&](const std::string& tag, std::size_t column, const std::string& scope, const std::string& text) {
    html +=
        "<" + tag + scope + (table.columns[column].number ? " class=\"n\">" : ">") + escape(text) + "</" + tag + ">";
  };
  html += "<tr>";
  for (std::size_t i = 0; i < table.columns.size(); ++i) cell("th", i, " scope=\"col\"", table.columns[i].name);
  html += "</tr></thead><tbody>";
  for (const auto& row : table.rows) {
    html += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i) cell(i == 0 ? "th" : "td", i, i == 0 ? " scope=\"row\"" : "", row[i]);
    html += "</tr>";
  }
  return html + "</tbody></table></div>\n";
}

std::string as_text(const Table& table) {
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < table.columns.size(); ++i) {
    widths.push_back(width_of(table.columns[i].name));
    for (const auto& row : table.rows) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  std::string text;
  const auto line = [&](const auto& cell_of) {
    std::string line;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string& cell = cell_of(i);
      const std::string space(widths[i] - width_of(cell), ' ');
      line += (i == 0 ? "" : "  ") + (table.columns[i].number ? space + cell : cell + space);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  };
  line([&](std::size_t i) -> const std::string& { return table.columns[i].name; });
  for (const auto& row : table.rows) line([&](std::size_t i) -> const std::string& { return row[i]; });
  return text;
}

}  // namespace efla::report
