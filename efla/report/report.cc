#include "efla/report/report.h"

#include <algorithm>
#include <utility>

#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/report/assets.h"
#include "efla/report/figure.h"
#include "efla/report/html.h"
#include "efla/report/table.h"

namespace efla::report {
namespace {

using nlohmann::json;

constexpr std::size_t kCategoryColors = 6, kRampColors = 5;  // --category-0 … and --ramp-0 … of page.css

std::string folded_html(const std::string& title, const std::string& content) {
  return "<details><summary>" + escape(title) + "</summary>" + content + "</details>\n";
}

std::string listing_html(const Listing& listing) {
  const auto text = "<pre><code>" + escape(listing.text) + "</code></pre>\n";
  if (listing.folded) return folded_html(listing.title, text);
  return (listing.title.empty() ? "" : "<p class=\"note\">" + escape(listing.title) + "</p>") + text;
}

// Returns the tables; if there are several, those that are not folded have their titles above them.
std::string tables_html(const std::vector<Table>& tables) {
  const auto open = std::count_if(tables.begin(), tables.end(), [](const Table& table) { return !table.folded; });
  std::string html;
  for (const auto& table : tables) {
    if (table.folded) {
      html += folded_html(table.title, table_html(table));
    } else {
      html += (open > 1 ? "<h3>" + escape(table.title) + "</h3>\n" : "") + table_html(table);
    }
  }
  return html;
}

// Returns "" for a section that has nothing to show.
std::string section_html(Section section, nlohmann::ordered_json& charts) {
  std::erase_if(section.figures, [](const Figure& figure) { return figure.series.empty(); });
  std::erase_if(section.tables, [](const Table& table) { return table.rows.empty(); });
  std::erase_if(section.listings, [](const Listing& listing) { return listing.text.empty(); });
  std::string content;
  for (const auto& figure : section.figures) {
    charts.push_back(chart_json(figure));
    content += chart_html(figure);
  }
  if (!content.empty()) content = legend_html(section.figures) + "<div class=\"charts\">\n" + content + "</div>\n";
  const auto fold = std::stable_partition(section.listings.begin(), section.listings.end(),
                                          [](const Listing& listing) { return !listing.folded; });
  const auto add_listings = [&](auto from, auto to) {
    for (auto listing = from; listing != to; ++listing) content += listing_html(*listing);
  };
  add_listings(section.listings.begin(), fold);
  content += tables_html(section.tables);
  add_listings(fold, section.listings.end());
  if (content.empty()) return "";
  const auto aside = section.aside.empty() ? "" : " <small>" + escape(section.aside) + "</small>";
  return "<section aria-labelledby=\"" + section.id + "\"><h2 id=\"" + section.id + "\">" + escape(section.heading) +
         aside + "</h2>\n" + (section.lead.empty() ? "" : "<p>" + escape(section.lead) + "</p>\n") + content +
         "</section>\n";
}

std::string paragraph(const char* kind, const std::string& html) {
  return html.empty() ? "" : std::string("<p class=\"") + kind + "\">" + html + "</p>\n";
}

// Returns a value of the environment: a list of devices by their names.
std::string environment_text(const json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (!value.is_array()) return string_of(value);
  std::vector<std::string> names;
  for (const auto& device : value) names.push_back(device.is_object() ? text_of(device, "name") : string_of(device));
  return names.empty() ? "none" : joined(names, ", ");
}

Table environment_table(const json& environment) {
  static const std::vector<std::pair<std::string, std::string>> kNames{
      {"version", "efla"},      {"commit", "Commit"},          {"date", "Date"},
      {"cpu", "Processor"},     {"simd_target", "SIMD"},       {"threads", "Threads"},
      {"compiler", "Compiler"}, {"build_type", "Build"},       {"libtorch", "LibTorch"},
      {"blas", "BLAS"},         {"blas_core", "BLAS kernels"}, {"cuda", "CUDA"},
      {"gpus", "GPUs"}};
  Table table{"Environment", {{"Environment", false}, {"", false}}};
  if (!environment.is_object()) return table;
  for (const auto& [key, name] : kNames) {
    if (environment.contains(key) && !environment.at(key).is_null()) {
      table.rows.push_back({name, environment_text(environment.at(key))});
    }
  }
  for (const auto& [key, value] : environment.items()) {
    const auto is_key = [&k = key](const auto& known) { return known.first == k; };
    if (std::none_of(kNames.begin(), kNames.end(), is_key)) table.rows.push_back({key, environment_text(value)});
  }
  return table;
}

}  // namespace

Style category_style(std::size_t i) {
  constexpr std::size_t kLines = 2 * kCategoryColors;  // whole and dashed; the next ones have other markers
  return {"--category-" + std::to_string(i % kCategoryColors), static_cast<int>(i + i / kLines),
          i / kCategoryColors % 2 == 1};
}

Style ramp_style(std::size_t i, std::size_t n) {
  const std::size_t color = n > 1 ? i * (kRampColors - 1) / (n - 1) : 0;
  return {"--ramp-" + std::to_string(color), static_cast<int>(i), false};
}

Section how_to_repeat(const std::string& command, const json& environment, Table runs) {
  runs.title = runs.rows.size() == 1 ? "The run" : "All " + std::to_string(runs.rows.size()) + " runs";
  runs.folded = true;
  return {"repeat",       "How to repeat this", "", "", {}, {environment_table(environment), std::move(runs)},
          {{"", command}}};
}

std::string render(const Report& report) {
  std::string facts, body;
  for (const auto& fact : report.facts) {
    facts += (facts.empty() ? "" : "<span aria-hidden=\"true\"> · </span>") + escape(fact);
  }
  const auto preamble = paragraph("meta", facts) + paragraph("summary", escape(report.summary)) +
                        paragraph("caveat", escape(report.caveat));
  auto charts = nlohmann::ordered_json::array();
  for (const auto& section : report.sections) body += section_html(section, charts);
  return fill(page_html(), {{"command", escape(report.command)},
                            {"title", escape(report.title)},
                            {"style", std::string(page_css())},
                            {"preamble", preamble},
                            {"body", body},
                            {"results", script_json(report.results)},
                            {"charts", script_json(charts)},
                            {"chart_js", std::string(chart_js())},
                            {"script", std::string(page_js())}});
}

std::filesystem::path write(const Report& report, const std::filesystem::path& folder) {
  io::write_file_atomically(folder / "results.json", io::to_json_text(report.results));
  io::write_file_atomically(folder / "report.html", render(report));
  return std::filesystem::absolute(folder / "report.html").lexically_normal();
}

}  // namespace efla::report
