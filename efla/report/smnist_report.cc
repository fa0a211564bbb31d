#include "efla/report/smnist_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "efla/base/error.h"
#include "efla/report/figure.h"
#include "efla/report/html.h"
#include "efla/report/page.h"
#include "efla/report/smnist_study.h"
#include "efla/report/smnist_summary.h"

namespace efla::report {
namespace {

using nlohmann::json;

constexpr int kMixerColors = 6, kRateColors = 5;  // --mixer-0 … and --rate-0 … of page.css

std::string count_text(int n) { return n > 0 ? std::to_string(n) : "–"; }

std::string rate_text(double lr) { return lr > 0 ? compact(lr) : "–"; }

bool is_on(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() && it->get<bool>();
}

// The line under the title, and what the figures cannot be taken for.
std::string preamble(const json& results) {
  const json none = json::object();
  const auto env = results.find("environment");
  const json& environment = env != results.end() && env->is_object() ? *env : none;
  const auto data = text_of(results, "data");
  std::vector<std::string> parts;
  if (data == "builtin") parts.push_back("Built-in digits");
  if (!data.empty() && data != "builtin") parts.push_back("Data: <code>" + escape(data) + "</code>");
  for (const auto& [key, use] : {std::pair{"train_images", "training"}, std::pair{"test_images", "test"}}) {
    if (const auto count = results.find(key); count != results.end() && count->is_number_unsigned()) {
      parts.push_back(count->dump() + " " + use + " images");
    }
  }
  for (const char* key : {"cpu", "date"}) {
    if (const auto text = text_of(environment, key); !text.empty()) parts.push_back(escape(text));
  }
  std::string html;
  if (!parts.empty()) html += "<p class=\"meta\">" + joined(parts, "<span aria-hidden=\"true\"> · </span>") + "</p>\n";
  std::string caveat;
  if (data == "builtin") caveat = "The images are digits that the program draws itself, not MNIST.";
  if (is_on(results, "quick")) {
    caveat +=
        (caveat.empty() ? "" : " ") +
        std::string("This is a quick run: it shows that everything works, and is too small to judge the paper by.");
  }
  if (!caveat.empty()) html += "<p class=\"caveat\">" + caveat + "</p>\n";
  return html;
}

std::vector<std::string> comparison_row(const Comparison& c, int layers, const std::string& level,
                                        const Comparison::Sides& sides) {
  static constexpr std::array words{"efla ahead", "deltanet ahead", "within the spread", "both guess"};
  return {kPerturbations[c.perturbation].name,
          count_text(layers),
          level,
          in_percent(sides.a),
          in_percent(sides.b),
          points(sides.a.mean - sides.b.mean),
          words[static_cast<std::size_t>(sides.verdict())]};
}

std::string comparison_section(const Study& study) {
  const auto pairs = efla_against_deltanet(study);
  std::vector<std::vector<std::string>> rows;
  for (const auto& pair : pairs) {
    for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
      const auto c = compare(pair.a, pair.b, i);
      if (!c) continue;
      rows.push_back(comparison_row(*c, pair.a.layers, compact(c->strongest_level), c->strongest));
      if (c->levels > 1) rows.push_back(comparison_row(*c, pair.a.layers, "mean of " + count_text(c->levels), c->mean));
    }
  }
  if (rows.empty()) return "";
  return section("comparison", "efla against deltanet",
                 "Test accuracy in percent at the strongest level of each test, and in the mean over its levels. "
                 "Differences are in points, positive where efla is ahead; "
                 "a difference no larger than the two standard deviations together is called within the spread.",
                 table("efla against deltanet",
                       {{"Test", false},
                        {"Layers", true},
                        {"Level", true},
                        {"efla", true},
                        {"deltanet", true},
                        {"Difference", true},
                        {"Reading", false}},
                       rows));
}

// The levels a table has room for: the middle one and the strongest of those that occur.
std::vector<double> chosen_levels(const std::vector<Group>& groups, std::size_t perturbation) {
  std::set<double> levels;
  for (const auto& group : groups) {
    for (const auto& point : group.perturbed[perturbation]) levels.insert(point.x);
  }
  const std::vector<double> all(levels.begin(), levels.end());
  if (all.size() < 2) return all;
  return {all[(all.size() - 1) / 2], all.back()};
}

std::string level_heading(std::size_t perturbation, double level) {
  static constexpr std::array symbols{"Dropout ", "Scale ×", "Noise "};
  return symbols[perturbation] + compact(level);
}

std::string results_section(const Study& study) {
  const auto& groups = study.groups.empty() ? study.headline : study.groups;
  if (groups.empty()) return "";
  std::vector<Column> columns{
      {"Mixer", false}, {"Layers", true}, {"Learning rate", true}, {"Seeds", true}, {"Clean", true}};
  std::vector<std::pair<std::size_t, double>> levels;
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    for (const double level : chosen_levels(groups, i)) {
      levels.emplace_back(i, level);
      columns.push_back({level_heading(i, level), true});
    }
  }
  columns.push_back({"Images/s", true});
  std::vector<std::vector<std::string>> rows;
  for (const auto& group : groups) {
    std::vector<std::string> row{escape(group.mixer), count_text(group.layers), rate_text(group.lr),
                                 count_text(static_cast<int>(group.seeds.size())), in_percent(group.clean)};
    for (const auto& [i, level] : levels) {
      const auto& line = group.perturbed[i];
      const auto point = std::find_if(line.begin(), line.end(), [x = level](const Point& p) { return p.x == x; });
      row.push_back(point == line.end() ? "–" : in_percent(point->y));
    }
    row.push_back(thousands(group.images_per_second.mean));
    rows.push_back(std::move(row));
  }
  return section("results", "Results",
                 "Test accuracy in percent, mean ± standard deviation over seeds (n − 1), on clean images and under "
                 "each disturbance; "
                 "images a second in training.",
                 table("Results", columns, rows));
}

// One panel for each kind of disturbance that was measured, of these configurations.
std::string panels(const std::string& id, const std::vector<std::pair<Series, Group>>& lines, Body& body) {
  std::string figures;
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    Figure figure{id + "-" + kPerturbations[i].key,
                  kPerturbations[i].name,
                  kPerturbations[i].axis,
                  Figure::Unit::accuracy,
                  i == 1,
                  true,
                  {}};
    for (const auto& [series, group] : lines) {
      if (group.perturbed[i].empty()) continue;
      figure.series.push_back({series.label, series.style, with_clean(group, i)});
    }
    if (figure.series.empty()) continue;
    body.charts.push_back(chart_json(figure));
    figures += chart_html(figure);
  }
  if (figures.empty()) return "";
  std::vector<Series> names;
  for (const auto& line : lines) names.push_back(line.first);
  return legend_html(names) + "<div class=\"charts\">\n" + figures + "</div>\n";
}

Style mixer_style(const Study& study, const std::string& mixer, bool dashed = false) {
  const auto place = std::find(study.mixers.begin(), study.mixers.end(), mixer) - study.mixers.begin();
  return {"mixer", static_cast<int>(place % kMixerColors), static_cast<int>(place), dashed};
}

constexpr const char* kBandNote = "Lines are means over seeds, bands reach from the lowest seed to the highest";

// Ends a sentence by the configuration that a section shows.
std::string headline_note(const Study& study) {
  const auto setting = headline_setting(study);
  return setting.empty() ? ". " : " (" + escape(setting) + "). ";
}

std::string robustness_section(const Study& study, Body& body) {
  std::vector<std::pair<Series, Group>> lines;
  for (const auto& group : study.headline) {
    lines.push_back({{group.mixer, mixer_style(study, group.mixer), {}}, group});
  }
  const auto content = panels("robustness", lines, body);
  if (content.empty()) return "";
  return section("robustness", "Robustness <small>figure 1 of the paper</small>",
                 std::string("Test accuracy as the images are disturbed more and more") + headline_note(study) +
                     kBandNote + "; the dashed grey line is chance.",
                 content);
}

std::string rates_section(const Study& study, Body& body) {
  const auto efla = std::find_if(study.headline.begin(), study.headline.end(),
                                 [](const Group& group) { return group.mixer == "efla"; });
  if (efla == study.headline.end()) return "";
  std::vector<std::pair<Series, Group>> lines;
  for (const auto& group : study.groups) {
    if (group.mixer != "efla" || group.layers != efla->layers) continue;
    lines.push_back({{"learning rate " + rate_text(group.lr), {"rate", 0, 0, false}, {}}, group});
  }
  if (lines.size() < 2) return "";
  const int last = static_cast<int>(lines.size()) - 1;
  for (int i = 0; i <= last; ++i) {  // spread over the ramp of colours
    lines[static_cast<std::size_t>(i)].first.style = {"rate", i * (kRateColors - 1) / last, i, false};
  }
  const auto content = panels("rates", lines, body);
  if (content.empty()) return "";
  return section(
      "rates", "Learning rate <small>figure 2 of the paper</small>",
      std::string("The same tests for efla alone, trained with different learning rates. ") + kBandNote + ".", content);
}

// The headline configurations beside those that differ from them in the number of layers alone.
std::string layers_section(const Study& study, Body& body) {
  std::vector<std::pair<Series, Group>> lines;
  for (const auto& chosen : study.headline) {
    std::vector<Group> stacked;
    for (const auto& group : study.groups) {
      if (group.mixer == chosen.mixer && group.lr == chosen.lr) stacked.push_back(group);
    }
    if (stacked.size() < 2) continue;
    for (const auto& group : stacked) {
      const auto label = group.mixer + ", " + std::to_string(group.layers) + (group.layers == 1 ? " layer" : " layers");
      lines.push_back({{label, mixer_style(study, group.mixer, group.layers != stacked.front().layers), {}}, group});
    }
  }
  const auto content = panels("layers", lines, body);
  if (lines.empty() || content.empty()) return "";
  return section(
      "layers", "One layer and more",
      std::string("The same tests by the number of layers, at the same learning rate; dashed: more layers. ") +
          kBandNote + ".",
      content);
}

std::string curves_section(const Study& study, Body& body) {
  Figure accuracy{"curves-accuracy", "Test accuracy", "epoch", Figure::Unit::accuracy, false, false, {}};
  Figure loss{"curves-loss", "Training loss", "step", Figure::Unit::loss, false, false, {}};
  std::vector<Series> names;
  for (const auto& group : study.headline) {
    const Series series{group.mixer, mixer_style(study, group.mixer), {}};
    if (!group.accuracy_by_epoch.empty())
      accuracy.series.push_back({series.label, series.style, group.accuracy_by_epoch});
    if (!group.loss_by_step.empty()) loss.series.push_back({series.label, series.style, group.loss_by_step});
    if (!group.accuracy_by_epoch.empty() || !group.loss_by_step.empty()) names.push_back(series);
  }
  std::string figures;
  for (const auto* figure : {&accuracy, &loss}) {
    if (figure->series.empty()) continue;
    body.charts.push_back(chart_json(*figure));
    figures += chart_html(*figure);
  }
  if (figures.empty()) return "";
  return section("curves", "Training",
                 std::string("Accuracy on the test images and loss on the training images") + headline_note(study) +
                     kBandNote + ".",
                 legend_html(names) + "<div class=\"charts\">\n" + figures + "</div>\n");
}

std::string runs_html(const json& runs) {
  std::vector<std::vector<std::string>> rows;
  std::string commands;
  for (const auto& run : runs) {
    if (!run.is_object()) continue;
    rows.push_back({escape(text_of(run, "name")), escape(text_of(run, "mixer")), escape(text_of(run, "layers")),
                    rate_text(number_of(run, "lr")), escape(text_of(run, "seed")), escape(text_of(run, "epochs")),
                    thousands(number_of(run, "parameters")), thousands(number_of(run, "images_per_second")),
                    thousands(number_of(run, "train_seconds")), percent(number_of(run, "clean_accuracy"))});
    if (const auto command = text_of(run, "command"); !command.empty()) commands += escape(command) + "\n";
  }
  if (rows.empty()) return "";
  std::string html = "<details><summary>All " + std::to_string(rows.size()) + " runs</summary>" +
                     table("All runs",
                           {{"Run", false},
                            {"Mixer", false},
                            {"Layers", true},
                            {"Learning rate", true},
                            {"Seed", true},
                            {"Epochs", true},
                            {"Parameters", true},
                            {"Images/s", true},
                            {"Training, s", true},
                            {"Clean", true}},
                           rows) +
                     "</details>\n";
  if (!commands.empty()) {
    html += "<details><summary>The command of each run</summary><pre tabindex=\"0\"><code>" + commands +
            "</code></pre></details>\n";
  }
  return html;
}

std::string repeat_section(const json& results) {
  std::string content;
  if (const auto command = text_of(results, "command"); !command.empty()) {
    content += "<pre tabindex=\"0\"><code>" + escape(command) + "</code></pre>\n";
  }
  if (const auto runs = results.find("runs"); runs != results.end() && runs->is_array()) content += runs_html(*runs);
  if (const auto env = results.find("environment"); env != results.end() && env->is_object()) {
    content += environment_html(*env);
  }
  return content.empty() ? "" : section("repeat", "How to repeat this", "", content);
}

// The results with whatever is not UTF-8 in them replaced, so that every string can be shown.
json cleaned(const json& results) {
  if (!results.is_object()) throw Error("report", "results", results.type_name(), "an object");
  if (const auto schema = results.find("schema"); schema != results.end() && *schema != 1) {
    throw Error("report", "schema of the results", schema->dump(-1, ' ', true, json::error_handler_t::replace), "1");
  }
  return json::parse(results.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace

std::string render_smnist_report(const json& raw) {
  const auto results = cleaned(raw);
  const auto study = read_study(results);
  Body body;
  if (const auto text = summary(study); !text.empty()) body.html += "<p class=\"summary\">" + escape(text) + "</p>\n";
  body.html += comparison_section(study);
  body.html += robustness_section(study, body);
  body.html += results_section(study);
  body.html += layers_section(study, body);
  body.html += rates_section(study, body);
  body.html += curves_section(study, body);
  body.html += repeat_section(results);
  const bool builtin = text_of(results, "data") == "builtin";
  return page("efla reproduce smnist",
              builtin ? "Robustness on built-in digit sequences" : "Robustness on pixel-sequence MNIST",
              preamble(results), body, results);
}

}  // namespace efla::report
