#include "efla/report/lm_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "efla/report/figure.h"
#include "efla/report/html.h"
#include "efla/report/page.h"

namespace efla::report {
namespace {

using nlohmann::json;

constexpr int kColors = 6;            // --mixer-0 … of page.css
constexpr std::size_t kPoints = 120;  // of a training curve
constexpr double kLastPart = 0.1;     // of the steps that "final" training loss is the mean of

// A run's curves and the numbers of the table; NaN where there is none.
struct Run {
  std::string name;
  json file;
  Line loss, perplexity, bits_per_byte;
  double tokens = NAN, final_loss = NAN, tokens_per_second = NAN, seconds = NAN;
  std::string sample;
  std::map<std::string, std::string> settings;  // "training.lr" → "0.001"
};

double last_of(const Line& line) { return line.empty() ? NAN : line.back().y.mean; }

Point point(double x, double y) { return {x, spread_of({y})}; }

// Means over equal numbers of steps, at the stretch's last step.
Line thinned(const std::vector<std::pair<double, double>>& points) {
  const std::size_t parts = std::min(points.size(), kPoints);
  Line line;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t first = points.size() * i / parts, last = points.size() * (i + 1) / parts;
    double sum = 0.0;
    for (std::size_t j = first; j < last; ++j) sum += points[j].second;
    line.push_back(point(points[last - 1].first, sum / static_cast<double>(last - first)));
  }
  return line;
}

double median(std::vector<double> values) {
  if (values.empty()) return NAN;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void flatten(const std::string& path, const json& value, std::map<std::string, std::string>& into) {
  if (value.is_object()) {
    for (const auto& [key, below] : value.items()) flatten(path.empty() ? key : path + "." + key, below, into);
  } else {
    into[path] = value.is_number_float() ? compact(value.get<double>()) : string_of(value);
  }
}

Run read(const LmRunRecord& record) {
  Run run{record.name, record.run.is_object() ? record.run : json::object(), {}, {}, {}, NAN, NAN, NAN, NAN, {}, {}};
  std::vector<std::pair<double, double>> losses;
  std::vector<double> rates;
  for (const json& line : record.metrics) {
    if (!line.is_object()) continue;
    const auto event = text_of(line, "event");
    const double tokens = number_of(line, "tokens"), loss = number_of(line, "loss");
    if (std::isfinite(tokens)) run.tokens = tokens;
    if (event == "step" && std::isfinite(tokens) && std::isfinite(loss)) {
      losses.emplace_back(tokens, loss);
      if (const double rate = number_of(line, "tokens_per_second"); std::isfinite(rate)) rates.push_back(rate);
      run.seconds = number_of(line, "seconds");
    } else if (event == "evaluation" && std::isfinite(tokens)) {
      const double perplexity = number_of(line, "perplexity"), bits = number_of(line, "bits_per_byte");
      if (std::isfinite(perplexity)) run.perplexity.push_back(point(tokens, perplexity));
      if (std::isfinite(bits)) run.bits_per_byte.push_back(point(tokens, bits));
    } else if (event == "sample") {
      run.sample = text_of(line, "text");
    }
  }
  run.loss = thinned(losses);
  const auto last = static_cast<std::size_t>(std::ceil(static_cast<double>(losses.size()) * kLastPart));
  double sum = 0.0;
  for (std::size_t i = losses.size() - last; i < losses.size(); ++i) sum += losses[i].second;
  if (last > 0) run.final_loss = sum / static_cast<double>(last);
  run.tokens_per_second = median(rates);
  if (run.file.contains("config")) flatten("", run.file["config"], run.settings);
  return run;
}

Style style_of(std::size_t index) {
  const int i = static_cast<int>(index);
  return {"mixer", i % kColors, i, i / kColors % 2 == 1};
}

// A chart of one line of every run that has it, or nothing.
std::string chart(const std::vector<Run>& runs, const std::string& id, const std::string& title, Line Run::*line,
                  Body& body) {
  Figure figure{id, title, "tokens", Figure::Unit::number, false, false, {}};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!(runs[i].*line).empty()) figure.series.push_back({runs[i].name, style_of(i), runs[i].*line});
  }
  if (figure.series.empty()) return "";
  body.charts.push_back(chart_json(figure));
  return chart_html(figure);
}

std::string curves_section(const std::vector<Run>& runs, Body& body) {
  std::string charts = chart(runs, "loss", "Training loss, nats a token", &Run::loss, body);
  charts += chart(runs, "perplexity", "Validation perplexity a token", &Run::perplexity, body);
  charts += chart(runs, "bits", "Validation, bits a byte", &Run::bits_per_byte, body);
  if (charts.empty()) return "";
  std::vector<Series> names;
  for (std::size_t i = 0; i < runs.size(); ++i) names.push_back({runs[i].name, style_of(i), {}});
  return section("curves", "Loss over tokens",
                 "Training loss is the mean of neighbouring steps, before their updates. Perplexities can be compared "
                 "between runs of the same tokenizer, bits a byte between all.",
                 legend_html(names) + "<div class=\"charts\">\n" + charts + "</div>\n");
}

std::string results_section(const std::vector<Run>& runs) {
  std::vector<std::vector<std::string>> rows;
  for (const Run& run : runs) {
    rows.push_back({escape(run.name), fixed(last_of(run.perplexity), 3), fixed(last_of(run.bits_per_byte), 4),
                    fixed(run.final_loss, 4), thousands(number_of(run.file, "parameters")), thousands(run.tokens),
                    thousands(run.tokens_per_second), thousands(run.seconds)});
  }
  return section("results", "Results",
                 "Perplexity and bits a byte of the last evaluation; training loss as the mean of the last tenth of "
                 "the steps; tokens a second as the median of the steps.",
                 table("Results",
                       {{"Run", false},
                        {"Perplexity", true},
                        {"Bits a byte", true},
                        {"Training loss", true},
                        {"Parameters", true},
                        {"Tokens", true},
                        {"Tokens/s", true},
                        {"Training, s", true}},
                       rows));
}

std::string setting_of(const Run& run, const std::string& key) {
  const auto found = run.settings.find(key);
  return found == run.settings.end() ? "–" : found->second;
}

std::string settings_section(const std::vector<Run>& runs) {
  std::set<std::string> keys;
  for (const Run& run : runs) {
    for (const auto& [key, value] : run.settings) keys.insert(key);
  }
  std::vector<Column> columns{{"Run", false}};
  std::vector<std::vector<std::string>> rows, common;
  for (const Run& run : runs) rows.push_back({escape(run.name)});
  for (const auto& key : keys) {
    const auto same = [&](const Run& run) { return setting_of(run, key) == setting_of(runs.front(), key); };
    if (std::all_of(runs.begin(), runs.end(), same)) {
      common.push_back({escape(key), escape(setting_of(runs.front(), key))});
      continue;
    }
    columns.push_back({escape(key), false});
    for (std::size_t i = 0; i < runs.size(); ++i) rows[i].push_back(escape(setting_of(runs[i], key)));
  }
  std::string content;
  if (columns.size() > 1) content += table("Where the configurations differ", columns, rows);
  if (!common.empty()) {
    content += "<details><summary>" + std::string(runs.size() > 1 ? "What all runs share" : "The configuration") +
               "</summary>" + table("Configuration", {{"Key", false}, {"Value", false}}, common) + "</details>\n";
  }
  if (content.empty()) return "";
  return section("settings", runs.size() > 1 ? "Where the configurations differ" : "Configuration", "", content);
}

std::string samples_section(const std::vector<Run>& runs) {
  std::string content;
  for (const Run& run : runs) {
    if (run.sample.empty()) continue;
    content += "<p class=\"note\">" + escape(run.name) + "</p><pre tabindex=\"0\"><code>" + escape(run.sample) +
               "</code></pre>\n";
  }
  return content.empty() ? "" : section("samples", "Last samples", "", content);
}

std::string repeat_section(const std::vector<Run>& runs) {
  std::string content;
  for (const Run& run : runs) {
    const auto command = text_of(run.file, "command");
    const auto found = run.file.find("environment");
    std::string about = command.empty() ? "" : "<pre tabindex=\"0\"><code>" + escape(command) + "</code></pre>\n";
    if (found != run.file.end() && found->is_object()) about += environment_html(*found);
    if (!about.empty()) content += "<details><summary>" + escape(run.name) + "</summary>" + about + "</details>\n";
  }
  return content.empty() ? "" : section("repeat", "How to repeat this", "", content);
}

// A sentence: which run came out best.
std::string summary(const std::vector<Run>& runs) {
  const Run* best = nullptr;
  for (const Run& run : runs) {
    if (run.perplexity.empty()) continue;
    if (best == nullptr || last_of(run.perplexity) < last_of(best->perplexity)) best = &run;
  }
  if (best == nullptr) return "";
  const std::string perplexity = fixed(last_of(best->perplexity), 3);
  return runs.size() == 1
             ? "Validation perplexity " + perplexity + " a token after " + thousands(best->tokens) + " tokens."
             : best->name + " has the lowest validation perplexity: " + perplexity + " a token after " +
                   thousands(best->tokens) + " tokens.";
}

}  // namespace

std::string render_lm_report(const std::vector<LmRunRecord>& records) {
  const auto cleaned = [](const json& value) {
    return json::parse(value.dump(-1, ' ', false, json::error_handler_t::replace));
  };
  std::vector<Run> runs;
  json results = json::array();
  for (const auto& record : records) {
    LmRunRecord clean{cleaned(record.name).get<std::string>(), cleaned(record.run), {}};
    for (const auto& line : record.metrics) clean.metrics.push_back(cleaned(line));
    runs.push_back(read(clean));
    results.push_back({{"name", clean.name}, {"run", clean.run}, {"metrics", clean.metrics}});
  }
  Body body;
  if (const auto text = summary(runs); !text.empty()) body.html += "<p class=\"summary\">" + escape(text) + "</p>\n";
  body.html += results_section(runs);
  body.html += curves_section(runs, body);
  body.html += settings_section(runs);
  body.html += samples_section(runs);
  body.html += repeat_section(runs);
  return page("efla report", runs.size() == 1 ? "Training of " + runs.front().name : "Training runs compared", "", body,
              results);
}

}  // namespace efla::report
