#include "efla/report/page.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "efla/report/assets.h"
#include "efla/report/html.h"

namespace efla::report {

using nlohmann::json;

std::string table(const std::string& label, const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows) {
  std::string html =
      "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"" + escape(label) + "\"><table><thead><tr>";
  const auto open = [&](const char* tag, std::size_t column, const char* scope) {
    html += std::string("<") + tag + scope + (columns[column].number ? " class=\"n\">" : ">");
  };
  for (std::size_t i = 0; i < columns.size(); ++i) {
    open("th", i, " scope=\"col\"");
    html += columns[i].name + "</th>";
  }
  html += "</tr></thead><tbody>";
  for (const auto& row : rows) {
    html += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i) {
      open(i == 0 ? "th" : "td", i, i == 0 ? " scope=\"row\"" : "");
      html += row[i] + (i == 0 ? "</th>" : "</td>");
    }
    html += "</tr>";
  }
  return html + "</tbody></table></div>\n";
}

std::string section(const std::string& id, const std::string& heading, const std::string& lead,
                    const std::string& content) {
  return "<section aria-labelledby=\"" + id + "\"><h2 id=\"" + id + "\">" + heading + "</h2>\n" +
         (lead.empty() ? "" : "<p>" + lead + "</p>\n") + content + "</section>\n";
}

std::string string_of(const json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

std::string text_of(const json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? "" : string_of(*it);
}

double number_of(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->get<double>() : NAN;
}

std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : separator) + part;
  return out;
}

std::string environment_html(const json& environment) {
  static const std::vector<std::pair<std::string, std::string>> kNames{
      {"version", "efla"},      {"commit", "Commit"},     {"date", "Date"},
      {"cpu", "Processor"},     {"simd_target", "SIMD"},  {"threads", "Threads"},
      {"compiler", "Compiler"}, {"libtorch", "LibTorch"}, {"blas", "BLAS"}};
  std::string items;
  const auto add = [&](const std::string& name, const json& value) {
    if (!value.is_null()) items += "<div><dt>" + escape(name) + "</dt><dd>" + escape(string_of(value)) + "</dd></div>";
  };
  for (const auto& [key, name] : kNames) {
    if (environment.contains(key)) add(name, environment[key]);
  }
  for (const auto& [key, value] : environment.items()) {
    if (std::none_of(kNames.begin(), kNames.end(), [&k = key](const auto& known) { return known.first == k; }))
      add(key, value);
  }
  return items.empty() ? "" : "<dl>" + items + "</dl>\n";
}

std::string page(const std::string& command, const std::string& title, const std::string& preamble, const Body& body,
                 const json& results) {
  return fill(page_html(), {{"command", escape(command)},
                            {"title", escape(title)},
                            {"style", std::string(page_css())},
                            {"preamble", preamble},
                            {"body", body.html},
                            {"results", script_json(results)},
                            {"charts", script_json(body.charts)},
                            {"chart_js", std::string(chart_js())},
                            {"script", std::string(page_js())}});
}

}  // namespace efla::report
