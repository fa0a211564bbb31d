#include "efla/report/figure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "efla/report/html.h"
#include "efla/report/table.h"

namespace efla::report {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kTableRows = 12;

std::string value_text(const Figure& figure, double value) {
  return figure.unit == Figure::Unit::accuracy ? percent(value) : fixed(value, 3);
}

// Returns the mean, with the range over seeds if there are several.
std::string cell_text(const Figure& figure, const Spread& y) {
  const auto mean = value_text(figure, y.mean);
  if (y.count < 2) return mean;
  const bool accuracy = figure.unit == Figure::Unit::accuracy;
  const double scale = accuracy ? 100 : 1;
  const int digits = accuracy ? 1 : 3;
  return mean + " (" + fixed(scale * y.low, digits) + "–" + fixed(scale * y.high, digits) + ")";
}

std::vector<double> all_x(const Figure& figure) {
  std::set<double> values;
  for (const auto& series : figure.series) {
    for (const auto& point : series.line) values.insert(point.x);
  }
  return {values.begin(), values.end()};
}

// Returns at most kTableRows of the values, evenly picked, with the first and the last.
std::vector<double> picked(const std::vector<double>& values) {
  if (values.size() <= kTableRows) return values;
  std::vector<double> out;
  for (std::size_t i = 0; i < kTableRows; ++i) out.push_back(values[i * (values.size() - 1) / (kTableRows - 1)]);
  return out;
}

std::string numbers_html(const Figure& figure) {
  const auto x = all_x(figure), rows = picked(x);
  Table table{"Numbers: " + figure.title, {{figure.x_label, false}}};
  for (const auto& series : figure.series) table.columns.push_back({series.label});
  for (const double at : rows) {
    auto& row = table.rows.emplace_back(1, compact(at));
    for (const auto& series : figure.series) {
      const auto point =
          std::find_if(series.line.begin(), series.line.end(), [&](const Point& p) { return p.x == at; });
      row.push_back(point == series.line.end() ? "–" : cell_text(figure, point->y));
    }
  }
  const auto note = rows.size() == x.size() ? ""
                                            : "<p class=\"note\">" + std::to_string(rows.size()) + " of " +
                                                  std::to_string(x.size()) + " points.</p>";
  return table_html(table) + note;
}

// Describes a chart in a sentence: the first and the last value of each line.
std::string description(const Figure& figure) {
  static constexpr std::array kUnits{"accuracy", "loss", "value"};
  std::string text = "Line chart “" + figure.title + "”, " + kUnits[static_cast<std::size_t>(figure.unit)] + " by " +
                     figure.x_label + ".";
  for (const auto& series : figure.series) {
    if (series.line.empty()) continue;
    const auto &first = series.line.front(), &last = series.line.back();
    text += " " + series.label + ": " + value_text(figure, first.y.mean) + " at " + compact(first.x);
    if (first.x != last.x) text += ", " + value_text(figure, last.y.mean) + " at " + compact(last.x);
    text += ".";
  }
  return text + " The numbers are in the table below the chart.";
}

std::string swatch_html(const Style& style) {
  // The markers of the charts, drawn by hand in a box of 28 × 12: circle, square, diamond, triangle.
  static constexpr std::array<const char*, 4> kMarkers{
      "<circle cx=\"14\" cy=\"6\" r=\"3.5\"/>",
      "<rect x=\"10.8\" y=\"2.8\" width=\"6.4\" height=\"6.4\"/>",
      "<path d=\"M14 1.4 18.6 6 14 10.6 9.4 6Z\"/>",
      "<path d=\"M14 1.8 18.4 9.6H9.6Z\"/>",
  };
  return "<svg class=\"swatch\" viewBox=\"0 0 28 12\" aria-hidden=\"true\" style=\"--line:var(" + style.color +
         ")\"><path d=\"M1 6H27\"" + (style.dashed ? " stroke-dasharray=\"5 3\"" : "") + "/>" +
         kMarkers[static_cast<std::size_t>(style.marker) % kMarkers.size()] + "</svg>";
}

}  // namespace

ordered_json chart_json(const Figure& figure) {
  auto series = ordered_json::array();
  for (const auto& s : figure.series) {
    auto points = ordered_json::array();
    for (const auto& p : s.line) points.push_back({p.x, p.y.mean, p.y.low, p.y.high});
    series.push_back({{"label", s.label},
                      {"color", s.style.color},
                      {"marker", s.style.marker},
                      {"dashed", s.style.dashed},
                      {"points", points}});
  }
  return {{"id", figure.id},
          {"xLabel", figure.x_label},
          {"accuracy", figure.unit == Figure::Unit::accuracy},
          {"logX", figure.log_x},
          {"logY", figure.unit == Figure::Unit::loss},
          {"chance", figure.chance ? ordered_json(*figure.chance) : ordered_json()},
          {"series", series}};
}

std::string chart_html(const Figure& figure) {
  return "<figure><figcaption>" + escape(figure.title) + "</figcaption><div class=\"plot\"><canvas id=\"" +
         escape(figure.id) + "\" role=\"img\" aria-label=\"" + escape(description(figure)) +
         "\"></canvas></div><details><summary>Numbers</summary>" + numbers_html(figure) + "</details></figure>\n";
}

std::string legend_html(const std::vector<Figure>& figures) {
  std::set<std::string> named;
  std::string html;
  for (const auto& figure : figures) {
    for (const auto& s : figure.series) {
      if (named.insert(s.label).second) html += "<li>" + swatch_html(s.style) + escape(s.label) + "</li>";
    }
  }
  return "<ul class=\"legend\">" + html + "</ul>\n";
}

}  // namespace efla::report
