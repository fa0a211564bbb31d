#include "efla/report/synthetic_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "efla/base/error.h"
#include "efla/report/figure.h"
#include "efla/report/html.h"
#include "efla/report/page.h"
#include "efla/report/smnist_summary.h"

namespace efla::report {
namespace {

using nlohmann::json;

constexpr int kStudyColors = 6;  // --mixer-0 … of page.css

const json& list_of(const json& object, const char* key) {
  static const json none = json::array();
  if (!object.is_object()) return none;
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : none;
}

// The values of a key in the order in which they first occur.
std::vector<std::string> distinct(const json& list, const char* key) {
  std::vector<std::string> values;
  for (const auto& entry : list) {
    const auto value = text_of(entry, key);
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  }
  return values;
}

Style style_of(const std::vector<std::string>& mixers, const std::string& mixer) {
  const auto i = static_cast<int>(std::find(mixers.begin(), mixers.end(), mixer) - mixers.begin());
  return {"mixer", i % kStudyColors, i, i / kStudyColors % 2 == 1};
}

const json* score_of(const json& scores, const std::string& task, const std::string& mixer) {
  for (const auto& score : scores) {
    if (text_of(score, "task") == task && text_of(score, "mixer") == mixer) return &score;
  }
  return nullptr;
}

// "96.5 ± 0.2", in percent; a dash where there is no mean.
std::string cell(double mean, double deviation) {
  if (!std::isfinite(mean)) return "–";
  return fixed(100 * mean, 1) + (std::isfinite(deviation) ? " ± " + fixed(100 * deviation, 1) : "");
}

// A mixer's row and, where a paper has any of its figures, the paper's below it.
class Rows {
 public:
  void add(const json& point) {
    ours_.push_back(cell(number_of(point, "mean"), number_of(point, "std")));
    paper_.push_back(cell(number_of(point, "paper"), number_of(point, "paper_std")));
    has_paper_ = has_paper_ || std::isfinite(number_of(point, "paper"));
    sums_[0] += number_of(point, "mean");
    sums_[1] += number_of(point, "paper");
  }
  void add_average() {
    const auto count = static_cast<double>(ours_.size());
    ours_.push_back(cell(sums_[0] / count, NAN));
    paper_.push_back(cell(sums_[1] / count, NAN));
  }
  void append_to(std::vector<std::vector<std::string>>& rows, const std::string& mixer,
                 const std::vector<std::string>& more) const {
    for (const auto* cells : {&ours_, &paper_}) {
      if (cells == &paper_ && !has_paper_) continue;
      auto& row = rows.emplace_back();
      row.push_back(escape(mixer) + (cells == &paper_ ? ", paper" : ""));
      row.insert(row.end(), cells->begin(), cells->end());
      for (const auto& text : more) row.push_back(cells == &paper_ ? "" : text);
    }
  }

 private:
  std::vector<std::string> ours_, paper_;
  bool has_paper_ = false;
  double sums_[2] = {0.0, 0.0};
};

// Where each task has one length: mixers by tasks, and their average.
std::string table_by_task(const json& scores) {
  const auto tasks = distinct(scores, "task"), mixers = distinct(scores, "mixer");
  std::vector<Column> columns{{"Mixer", false}};
  for (const auto& task : tasks) columns.push_back({escape(task), true});
  columns.push_back({"Average", true});
  std::vector<std::vector<std::string>> cells;
  for (const auto& mixer : mixers) {
    Rows rows;
    for (const auto& task : tasks) {
      const json* score = score_of(scores, task, mixer);
      const json& points = score == nullptr ? list_of(json(), "") : list_of(*score, "accuracy");
      rows.add(points.empty() ? json::object() : points.front());
    }
    rows.add_average();
    rows.append_to(cells, mixer, {});
  }
  return table("Accuracy", columns, cells);
}

// A task's name as part of an HTML id.
std::string id_of(std::string task) {
  std::erase(task, ',');
  std::replace(task.begin(), task.end(), ' ', '-');
  return task;
}

// "Length 64", and how many pairs where tests differ in them.
std::string test_name(const json& point) {
  const auto pairs = text_of(point, "pairs");
  return "Length " + text_of(point, "length") + (pairs.empty() ? "" : ", pairs " + pairs);
}

// Whether a task's tests differ in their pairs.
bool is_by_pairs(const json& scores, const std::string& task) {
  for (const auto& score : scores) {
    if (text_of(score, "task") == task && distinct(list_of(score, "accuracy"), "pairs").size() > 1) return true;
  }
  return false;
}

// Mixers by lengths, for one task.
std::string table_by_length(const json& scores, const std::string& task) {
  std::vector<Column> columns{{"Mixer", false}};
  std::vector<std::vector<std::string>> cells;
  for (const auto& score : scores) {
    if (text_of(score, "task") != task) continue;
    const auto& points = list_of(score, "accuracy");
    if (points.empty()) continue;
    if (columns.size() == 1) {
      for (const auto& point : points) columns.push_back({escape(test_name(point)), true});
      for (const char* name : {"Learning rate", "Seeds", "Diverged"}) columns.push_back({name, true});
    }
    Rows rows;
    for (const auto& point : points) rows.add(point);
    const double lr = number_of(score, "lr");
    rows.append_to(cells, text_of(score, "mixer"),
                   {std::isfinite(lr) ? compact(lr) : "–", text_of(score, "seeds"),
                    text_of(score, "diverged") + " of " + text_of(score, "runs")});
  }
  return cells.empty() ? "" : table(task, columns, cells);
}

Point point(double x, double mean, double deviation) {
  const double half = std::isfinite(deviation) ? deviation : 0.0;
  return {x, {mean, deviation, mean - half, mean + half, std::isfinite(deviation) ? 2 : 1}};
}

std::string drawn(Figure& figure, Body& body) {
  if (figure.series.empty()) return "";
  body.charts.push_back(chart_json(figure));
  return chart_html(figure);
}

std::string legend_of(const std::vector<std::string>& mixers) {
  std::vector<Series> names;
  for (const auto& mixer : mixers) names.push_back({mixer, style_of(mixers, mixer), {}});
  return legend_html(names);
}

bool is_by_length(const json& scores) {
  return std::any_of(scores.begin(), scores.end(), [](const json& s) { return list_of(s, "accuracy").size() > 1; });
}

std::string scores_section(const json& scores, Body& body) {
  constexpr const char* kLead =
      "Accuracy in percent, mean ± standard deviation over seeds, at the learning rate and weight decay that are best "
      "at the training length (MQAR: on the tests of at most the longest training examples); in a row of their own the "
      "paper’s figures, whose sizes are those of --scale paper.";
  if (scores.empty()) return "";
  if (!is_by_length(scores)) return section("scores", "Accuracy", kLead, table_by_task(scores));
  const auto mixers = distinct(scores, "mixer");
  std::string content = legend_of(mixers) + "<div class=\"charts\">\n", tables;
  for (const auto& task : distinct(scores, "task")) {
    const bool by_pairs = is_by_pairs(scores, task);
    Figure figure{"length-" + id_of(task),
                  task,
                  by_pairs ? "keys with their values" : "tokens of the sequence",
                  Figure::Unit::accuracy,
                  true,
                  false,
                  {}};
    for (const auto& mixer : mixers) {
      const json* score = score_of(scores, task, mixer);
      Line line;
      for (const auto& p : score == nullptr ? list_of(json(), "") : list_of(*score, "accuracy")) {
        const double mean = number_of(p, "mean");
        if (std::isfinite(mean))
          line.push_back(point(number_of(p, by_pairs ? "pairs" : "length"), mean, number_of(p, "std")));
      }
      if (!line.empty()) figure.series.push_back({mixer, style_of(mixers, mixer), line});
    }
    content += drawn(figure, body);
    tables += "<h3>" + escape(task) + "</h3>\n" + table_by_length(scores, task);
  }
  return section("scores", "Accuracy by length", kLead, content + "</div>\n" + tables);
}

std::string eigenvalues_section(const json& results, Body& body) {
  const auto found = results.find("eigenvalues");
  if (found == results.end() || !found->is_object()) return "";
  const auto mixers = distinct(list_of(results, "scores"), "mixer");
  Figure figure{"eigenvalues-by-x", "Eigenvalue along the key", "x = β‖k‖²", Figure::Unit::number, false, false, {}};
  std::vector<std::string> shown;
  for (const auto& [mixer, curve] : found->items()) {
    Line line;
    for (const auto& p : curve) {
      if (p.is_array() && p.size() == 2 && p[0].is_number() && p[1].is_number()) line.push_back(point(p[0], p[1], NAN));
    }
    if (line.empty()) continue;
    figure.series.push_back({mixer, style_of(mixers, mixer), line});
    shown.push_back(mixer);
  }
  const auto chart = drawn(figure, body);
  if (chart.empty()) return "";
  return section(
      "eigenvalues", "What a token can do to the state",
      "The eigenvalue of a token’s transition along its key, over the x that the mixer can choose. Below zero "
      "the state turns over, which following a parity over any length needs; at −1 nothing is forgotten.",
      legend_of(mixers) + "<div class=\"charts\">\n" + chart + "</div>\n");
}

// Accuracy while training of the runs that count, by task; the mean over seeds of the first setting.
std::string curves_section(const json& results, Body& body) {
  const auto& scores = list_of(results, "scores");
  const auto mixers = distinct(scores, "mixer");
  std::string charts;
  for (const auto& task : distinct(scores, "task")) {
    Figure figure{"curve-" + id_of(task), task, "step", Figure::Unit::accuracy, false, false, {}};
    for (const auto& mixer : mixers) {
      const json* score = score_of(scores, task, mixer);
      if (score == nullptr) continue;
      std::map<double, std::vector<double>> samples;
      for (const auto& run : list_of(results, "runs")) {
        if (text_of(run, "task") != task || text_of(run, "mixer") != mixer || !text_of(run, "setting").empty())
          continue;
        if (run.value("lr", json()) != score->value("lr", json()) ||
            run.value("weight_decay", json()) != score->value("weight_decay", json())) {
          continue;
        }
        for (const auto& p : list_of(run, "curve")) samples[number_of(p, "step")].push_back(number_of(p, "accuracy"));
      }
      Line line;
      for (const auto& [step, values] : samples) line.push_back({step, spread_of(values)});
      if (!line.empty()) figure.series.push_back({mixer, style_of(mixers, mixer), line});
    }
    charts += drawn(figure, body);
  }
  if (charts.empty()) return "";
  return section("curves", "Training",
                 "Accuracy on the first test while training; lines are means over seeds, bands "
                 "their ranges.",
                 legend_of(mixers) + "<div class=\"charts\">\n" + charts + "</div>\n");
}

std::string runs_section(const json& results) {
  std::string content;
  if (const auto command = text_of(results, "command"); !command.empty()) {
    content += "<pre tabindex=\"0\"><code>" + escape(command) + "</code></pre>\n";
  }
  std::vector<std::vector<std::string>> rows;
  for (const auto& run : list_of(results, "runs")) {
    const auto& tests = list_of(run, "tests");
    rows.push_back({escape(text_of(run, "name")), thousands(number_of(run, "parameters")),
                    thousands(number_of(run, "steps")), thousands(number_of(run, "train_seconds")),
                    thousands(number_of(run, "sequences_per_second")),
                    tests.empty() ? "diverged" : percent(number_of(tests.front(), "accuracy"))});
  }
  if (!rows.empty()) {
    content += "<details><summary>All " + std::to_string(rows.size()) + " runs</summary>" +
               table("All runs",
                     {{"Run", false},
                      {"Parameters", true},
                      {"Steps", true},
                      {"Training, s", true},
                      {"Sequences/s", true},
                      {"Accuracy", true}},
                     rows) +
               "</details>\n";
  }
  if (const auto env = results.find("environment"); env != results.end() && env->is_object()) {
    content += environment_html(*env);
  }
  return content.empty() ? "" : section("repeat", "How to repeat this", "", content);
}

std::string summary(const json& results) {
  const auto& runs = list_of(results, "runs");
  if (runs.empty()) return "";
  const auto diverged = std::count_if(runs.begin(), runs.end(), [](const json& run) {
    return run.is_object() && run.value("diverged", json()) == true;
  });
  const auto none_or_count = diverged == 0 ? std::string("None") : std::to_string(diverged);
  return "<p class=\"summary\">" + none_or_count + " of " + std::to_string(runs.size()) + " runs diverged.</p>\n";
}

std::string scale_note(const json& results) {
  const auto scale = text_of(results, "scale");
  if (scale == "tiny") {
    return "<p class=\"caveat\">This is a tiny run: it shows that everything works, and says nothing else.</p>\n";
  }
  if (scale == "small") {
    return "<p class=\"caveat\">This is a small run: shorter sequences, narrower models and fewer steps than the "
           "papers’.</p>\n";
  }
  return "";
}

std::string title_of(const std::string& study) {
  if (study == "mad") return "MAD: six synthetic tasks";
  if (study == "extrapolation") return "Length extrapolation of the exponential integrator";
  if (study == "mqar") return "Multi-query associative recall";
  return "State tracking beyond the training length";
}

}  // namespace

std::string render_synthetic_report(const json& raw) {
  if (!raw.is_object()) throw Error("report", "results", raw.type_name(), "an object");
  if (raw.value("schema", json(1)) != 1) throw Error("report", "schema of the results", raw["schema"].dump(), "1");
  const json results = json::parse(raw.dump(-1, ' ', false, json::error_handler_t::replace));
  const auto study = text_of(results, "study");
  Body body;
  body.html += summary(results);
  body.html += scores_section(list_of(results, "scores"), body);
  body.html += eigenvalues_section(results, body);
  body.html += curves_section(results, body);
  body.html += runs_section(results);
  return page("efla reproduce " + study, title_of(study), scale_note(results), body, results);
}

}  // namespace efla::report
