#include "experiments/synthetic/report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "efla/report/html.h"
#include "experiments/synthetic/plan.h"
#include "experiments/synthetic/scores.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using report::Figure;
using report::Line;
using report::number_of;
using report::Section;
using report::Table;
using report::text_of;

// The scores, with the tasks and mixers in the order in which they first occur.
struct Scores {
  json list;
  std::vector<std::string> tasks, mixers;

  explicit Scores(const ordered_json& scores) : list(scores) {
    const auto add = [](std::vector<std::string>& names, const std::string& name) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    };
    for (const auto& score : list) {
      add(tasks, score.at("task"));
      add(mixers, score.at("mixer"));
    }
  }

  const json& of(const std::string& task, const std::string& mixer) const {
    return *std::find_if(list.begin(), list.end(),
                         [&](const json& score) { return score.at("task") == task && score.at("mixer") == mixer; });
  }

  report::Style style(const std::string& mixer) const {
    return report::category_style(
        static_cast<std::size_t>(std::find(mixers.begin(), mixers.end(), mixer) - mixers.begin()));
  }
};

// Returns a mean and its deviation, NaN for none. A deviation is one of accuracies, whose band ends at 0 and 1.
Spread given(double mean, double deviation) {
  if (!std::isfinite(deviation)) return {mean, deviation, mean, mean, 1};
  return {mean, deviation, std::max(mean - deviation, 0.0), std::min(mean + deviation, 1.0), 2};
}

std::string in_percent(double mean, double deviation) { return report::plus_minus(given(mean, deviation), 100.0); }

// A mixer's row of a table and, if the paper has figures of the mixer, the paper's row below.
class Rows {
 public:
  void add(const json& point) {
    const double ours = number_of(point, "mean"), paper = number_of(point, "paper");
    ours_.push_back(in_percent(ours, number_of(point, "std")));
    paper_.push_back(in_percent(paper, number_of(point, "paper_std")));
    has_paper_ = has_paper_ || std::isfinite(paper);
    sum_ += ours;
    paper_sum_ += paper;
  }
  void add_average() {
    const auto count = static_cast<double>(ours_.size());
    ours_.push_back(in_percent(sum_ / count, NAN));
    paper_.push_back(in_percent(paper_sum_ / count, NAN));
  }
  void append_to(Table& table, const std::string& mixer, const std::vector<std::string>& more) const {
    const auto append = [&](const std::string& name, const std::vector<std::string>& cells) -> auto& {
      auto& row = table.rows.emplace_back(1, name);
      row.insert(row.end(), cells.begin(), cells.end());
      return row;
    };
    auto& row = append(mixer, ours_);
    row.insert(row.end(), more.begin(), more.end());
    if (has_paper_) append(mixer + ", paper", paper_).resize(table.columns.size());
  }

 private:
  std::vector<std::string> ours_, paper_;
  bool has_paper_ = false;
  double sum_ = 0.0, paper_sum_ = 0.0;
};

// Returns mixers by tasks and their average, for tasks with one test each.
Table table_by_task(const Scores& scores) {
  Table table{"Accuracy", {{"Mixer", false}}};
  for (const auto& task : scores.tasks) table.columns.push_back({task});
  table.columns.push_back({"Average"});
  for (const auto& mixer : scores.mixers) {
    Rows rows;
    for (const auto& task : scores.tasks) {
      const json& points = scores.of(task, mixer).at("accuracy");
      rows.add(points.empty() ? json::object() : points.front());
    }
    rows.add_average();
    rows.append_to(table, mixer, {});
  }
  return table;
}

// Returns mixers by tests, for one task. A mixer of which every run diverged has a row without accuracies of its own.
Table table_by_test(const Scores& scores, const std::string& task) {
  Table table{task, {{"Mixer", false}}};
  json tests = json::array();
  for (const auto& mixer : scores.mixers) {
    if (tests.empty()) tests = scores.of(task, mixer).at("accuracy");
  }
  for (const auto& test : tests) {
    const auto pairs = text_of(test, "pairs");
    table.columns.push_back({"Length " + text_of(test, "length") + (pairs.empty() ? "" : ", pairs " + pairs)});
  }
  for (const char* name : {"Learning rate", "Seeds", "Diverged"}) table.columns.push_back({name});
  for (const auto& mixer : scores.mixers) {
    const json& score = scores.of(task, mixer);
    const json& points = score.at("accuracy");
    Rows rows;
    for (std::size_t i = 0; i < tests.size(); ++i) rows.add(points.empty() ? json::object() : points[i]);
    rows.append_to(table, mixer,
                   {report::compact(number_of(score, "lr")), text_of(score, "seeds"),
                    text_of(score, "diverged") + " of " + text_of(score, "runs")});
  }
  return table;
}

Figure figure_by_test(const Scores& scores, const std::string& task) {
  const auto points_of = [&](const std::string& mixer) -> const json& { return scores.of(task, mixer).at("accuracy"); };
  const bool by_pairs = std::any_of(scores.mixers.begin(), scores.mixers.end(), [&](const std::string& mixer) {
    return !points_of(mixer).empty() && points_of(mixer).front().contains("pairs");
  });
  Figure figure{"length-" + word_of(task), task, by_pairs ? "keys with their values" : "tokens of the sequence",
                Figure::Unit::accuracy, true};
  for (const auto& mixer : scores.mixers) {
    Line line;
    for (const auto& point : points_of(mixer)) {
      const double mean = number_of(point, "mean");
      if (!std::isfinite(mean)) continue;
      line.push_back({number_of(point, by_pairs ? "pairs" : "length"), given(mean, number_of(point, "std"))});
    }
    if (!line.empty()) figure.series.push_back({mixer, scores.style(mixer), line});
  }
  return figure;
}

// Returns whether a point of the scores has the figure `key`.
bool any_has(const Scores& scores, const char* key) {
  return std::any_of(scores.list.begin(), scores.list.end(), [key](const json& score) {
    const json& points = score.at("accuracy");
    return std::any_of(points.begin(), points.end(), [key](const json& point) { return !point.at(key).is_null(); });
  });
}

// Returns what the figures of the scores are: of the settings that are best on the deciding tests.
std::string scores_lead(const Scores& scores, std::size_t deciding_tests) {
  return std::string(
             "Accuracy in percent, mean ± standard deviation over seeds, at the learning rate and weight decay "
             "that are best ") +
         (deciding_tests > 1 ? "on the tests that are not longer than the longest training examples."
                             : "at the training length.") +
         (any_has(scores, "paper")
              ? " A row of its own has the paper’s figures, whose sizes are the sizes of --scale paper."
              : "");
}

Section scores_section(const Scores& scores, std::size_t deciding_tests) {
  Section section{"scores", "Accuracy", "", scores_lead(scores, deciding_tests)};
  const auto several_tests = [](const json& score) { return score.at("accuracy").size() > 1; };
  if (std::none_of(scores.list.begin(), scores.list.end(), several_tests)) {
    section.tables.push_back(table_by_task(scores));
    return section;
  }
  section.heading = "Accuracy by length";
  if (any_has(scores, "std")) {
    section.lead +=
        " Bands in the charts reach one standard deviation to each side of the mean, within 0 and 100 per cent.";
  }
  for (const auto& task : scores.tasks) {
    section.figures.push_back(figure_by_test(scores, task));
    section.tables.push_back(table_by_test(scores, task));
  }
  return section;
}

Section eigenvalues_section(const Scores& scores, const ordered_json& eigenvalues) {
  Figure figure{"eigenvalues-by-x", "Eigenvalue along the key", "x = β‖k‖²"};
  for (const auto& [mixer, curve] : eigenvalues.items()) {
    Line line;
    for (const auto& point : curve) line.push_back({point[0], given(point[1], NAN)});
    figure.series.push_back({mixer, scores.style(mixer), line});
  }
  return {"eigenvalues",
          "What a token can do to the state",
          "",
          "The eigenvalue of a token’s transition along its key, over the x that the mixer can choose. Below zero the "
          "state changes its sign, which is needed to follow a parity over any length; at −1 nothing is forgotten.",
          {figure}};
}

// Returns the accuracy during training of the runs that count, by task: means over seeds at the first setting.
Section curves_section(const Scores& scores, const std::vector<ordered_json>& runs) {
  Section section{"curves", "Training", "",
                  "Accuracy on the first test during training. Lines are means over seeds, bands their ranges."};
  for (const auto& task : scores.tasks) {
    Figure figure{"curve-" + word_of(task), task, "step", Figure::Unit::accuracy};
    for (const auto& mixer : scores.mixers) {
      const json& score = scores.of(task, mixer);
      std::map<double, std::vector<double>> samples;
      for (const auto& run : runs) {
        const bool counts = run.at("task") == task && run.at("mixer") == mixer && run.at("setting") == "" &&
                            json(run.at("lr")) == score.at("lr") &&
                            json(run.at("weight_decay")) == score.at("weight_decay");
        if (!counts) continue;
        for (const json point : run.at("curve")) {
          // A logit of a run that diverged may have been non-finite.
          if (const double accuracy = number_of(point, "accuracy"); std::isfinite(accuracy)) {
            samples[number_of(point, "step")].push_back(accuracy);
          }
        }
      }
      Line line;
      for (const auto& [step, values] : samples) line.push_back({step, spread_of(values)});
      if (!line.empty()) figure.series.push_back({mixer, scores.style(mixer), line});
    }
    section.figures.push_back(figure);
  }
  return section;
}

Table runs_table(const std::vector<ordered_json>& runs) {
  Table table{"", {{"Run", false}, {"Parameters"}, {"Steps"}, {"Training, s"}, {"Sequences/s"}, {"Accuracy"}}};
  for (const json run : runs) {
    const auto number = [&](const char* key) { return report::thousands(number_of(run, key)); };
    const json& tests = run.at("tests");
    table.rows.push_back({text_of(run, "name"), number("parameters"), number("steps"), number("train_seconds"),
                          number("sequences_per_second"),
                          tests.empty() ? "diverged" : report::percent(number_of(tests.front(), "accuracy"))});
  }
  return table;
}

}  // namespace

report::Report synthetic_report(const Plan& plan, const Outcome& outcome) {
  const auto& settings = plan.settings();
  const auto& runs = outcome.runs;
  const auto list = score_runs(settings, runs);
  const Scores scores(list);
  const auto diverged =
      std::count_if(runs.begin(), runs.end(), [](const ordered_json& run) { return run.at("diverged") == true; });

  report::Report report{"efla reproduce " + plan.study(), plan.title()};
  report.caveat = settings.value("caveat", "");
  report.summary = (diverged == 0 ? "None" : std::to_string(diverged)) + std::string(" of ") +
                   std::to_string(runs.size()) + " runs diverged.";
  report.results = results_of(plan.study(), settings, outcome, list);
  report.sections = {scores_section(scores, settings.value("deciding_tests", std::size_t{1}))};
  if (const auto curves = eigenvalues(scores.mixers); settings.value("eigenvalues", false) && !curves.empty()) {
    report.sections.push_back(eigenvalues_section(scores, curves));
    report.results["eigenvalues"] = curves;
  }
  report.sections.push_back(curves_section(scores, runs));
  report.sections.push_back(report::how_to_repeat(outcome.command, outcome.environment, runs_table(runs)));
  return report;
}

}  // namespace efla::experiments
