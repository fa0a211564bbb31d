#include "experiments/smnist/report.h"

#include <algorithm>
#include <array>
#include <utility>

#include "efla/eval/perturb.h"
#include "efla/report/html.h"
#include "experiments/smnist/comparison.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using report::compact;
using report::Figure;
using report::plus_minus;
using report::Section;
using report::Style;
using report::Table;

// How a panel of eval::robustness_panels() is shown.
struct Shown {
  const char *title, *axis, *level;
};
constexpr std::array<Shown, 3> kShown{{
    {"Pixel dropout", "share of pixels dropped, p", "Dropout "},
    {"Intensity scaling", "intensity factor", "Scale ×"},
    {"Gaussian noise", "standard deviation of the noise, σ", "Noise "},
}};
constexpr std::array kVerdicts{"efla ahead", "deltanet ahead", "within the spread", "both guess"};
constexpr const char* kBandNote = "Lines are means over seeds, bands reach from the lowest seed to the highest.";

std::string in_percent(const Spread& spread) { return plus_minus(spread, 100.0); }

struct Configurations {
  std::vector<std::string> mixers;
  std::vector<Group> groups;           // by mixer in that order, layers, learning rate
  std::vector<const Group*> headline;  // of each mixer

  Style style(const std::string& mixer) const {
    const auto place = std::find(mixers.begin(), mixers.end(), mixer) - mixers.begin();
    return report::category_style(static_cast<std::size_t>(place));
  }
  const Group* find(const std::string& mixer, int layers, double lr) const {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      return group.mixer == mixer && group.layers == layers && group.lr == lr;
    });
    return found == groups.end() ? nullptr : &*found;
  }
};

// Returns the number of seeds that did not diverge, and of all seeds if others did.
std::string seeds_text(const Group& group) {
  const auto seeds = std::to_string(group.runs.size());
  return group.diverged == 0 ? seeds : seeds + " of " + std::to_string(group.seeds());
}

std::string setting_of(const Group& group) {
  return std::to_string(group.layers) + (group.layers == 1 ? " layer" : " layers") + ", learning rate " +
         compact(group.lr) + ", " + seeds_text(group) + (group.seeds() == 1 ? " seed" : " seeds");
}

// Returns the configurations to compare: efla and deltanet at the headline, then with each other number of layers. A
// configuration of which every run diverged is not compared.
std::vector<std::pair<const Group*, const Group*>> pairs_of(const Configurations& study) {
  std::vector<std::pair<const Group*, const Group*>> pairs;
  const double lr = study.headline.front()->lr;
  for (const Group& a : study.groups) {
    if (a.mixer != "efla" || a.lr != lr || a.runs.empty()) continue;
    const Group* b = study.find("deltanet", a.layers, lr);
    if (b != nullptr && !b->runs.empty()) pairs.emplace_back(&a, b);
  }
  return pairs;
}

Section comparison_section(const Configurations& study) {
  Table table{"efla against deltanet",
              {{"Test", false}, {"Layers"}, {"Level"}, {"efla"}, {"deltanet"}, {"Difference"}, {"Reading", false}}};
  for (const auto& [a, b] : pairs_of(study)) {
    for (const auto& c : compare(*a, *b)) {
      const auto& levels = eval::robustness_panels()[c.panel].levels;
      const auto add = [&, layers = a->layers](const std::string& level, const Spread(&sides)[2]) {
        const auto difference = report::fixed(100.0 * (sides[0].mean - sides[1].mean), 1);
        table.rows.push_back({kShown[c.panel].title, std::to_string(layers), level, in_percent(sides[0]),
                              in_percent(sides[1]), difference,
                              kVerdicts[static_cast<std::size_t>(verdict(sides[0], sides[1]))]});
      };
      add(compact(levels.back()), c.strongest);
      add("mean of " + std::to_string(levels.size() - 1), c.mean);
    }
  }
  return {"comparison",
          "efla against deltanet",
          "",
          "Test accuracy in percent at the strongest level of each test, and in the mean over its levels. Differences "
          "are in points, positive where efla is ahead. A difference no larger than the two standard deviations "
          "together is called within the spread.",
          {},
          {table}};
}

struct Shape {
  const Group* group;
  std::string label;
  Style style;
};

// Returns a figure per panel with a line per group that has runs.
std::vector<Figure> panels(const std::string& id, const std::vector<Shape>& lines) {
  std::vector<Figure> figures;
  for (std::size_t i = 0; i < kShown.size(); ++i) {
    const auto& panel = eval::robustness_panels()[i];
    Figure figure{id + "-" + std::string(panel.name),
                  kShown[i].title,
                  kShown[i].axis,
                  Figure::Unit::accuracy,
                  panel.levels[0] > 0.0,
                  0.1};
    for (const auto& line : lines) {
      if (!line.group->runs.empty()) figure.series.push_back({line.label, line.style, line.group->line(i)});
    }
    figures.push_back(figure);
  }
  return figures;
}

Section robustness_section(const Configurations& study) {
  std::vector<Shape> lines;
  for (const Group* group : study.headline) lines.push_back({group, group->mixer, study.style(group->mixer)});
  return {"robustness", "Robustness", "figure 1 of the paper",
          "Test accuracy under growing disturbance (" + setting_of(*study.headline.front()) + "). " + kBandNote +
              " The dashed grey line is chance.",
          panels("robustness", lines)};
}

Section results_section(const Configurations& study) {
  Table table{"Results", {{"Mixer", false}, {"Layers"}, {"Learning rate"}, {"Seeds"}, {"Clean"}}};
  // The table has room for two levels of each panel: the middle one and the strongest.
  std::vector<std::pair<std::size_t, std::size_t>> levels;
  for (std::size_t i = 0; i < kShown.size(); ++i) {
    const auto& all = eval::robustness_panels()[i].levels;
    for (const std::size_t level : {all.size() / 2, all.size() - 1}) {
      levels.emplace_back(i, level);
      table.columns.push_back({kShown[i].level + compact(all[level])});
    }
  }
  table.columns.push_back({"Images/s"});
  for (const auto& group : study.groups) {
    auto& row =
        table.rows.emplace_back(std::vector<std::string>{group.mixer, std::to_string(group.layers), compact(group.lr),
                                                         seeds_text(group), in_percent(group.of("clean_accuracy"))});
    for (const auto& [panel, level] : levels) row.push_back(in_percent(group.accuracy(panel, level)));
    row.push_back(report::thousands(group.of("images_per_second").mean));
  }
  return {"results",
          "Results",
          "",
          "Test accuracy in percent, mean ± standard deviation over seeds (n − 1), on clean images and under each "
          "disturbance; images per second in training.",
          {},
          {table}};
}

// Compares the headline configurations with the configurations that differ only in the number of layers.
Section layers_section(const Configurations& study) {
  std::vector<Shape> lines;
  for (const Group* chosen : study.headline) {
    for (const Group& group : study.groups) {
      if (group.mixer != chosen->mixer || group.lr != chosen->lr) continue;
      auto style = study.style(group.mixer);
      style.dashed = group.layers != chosen->layers;
      lines.push_back({&group,
                       group.mixer + ", " + std::to_string(group.layers) + (group.layers == 1 ? " layer" : " layers"),
                       style});
    }
  }
  Section section{"layers", "One layer and more", "",
                  std::string("The same tests by the number of layers, at the same learning rate. Dashed lines have "
                              "another number of layers than the headline. ") +
                      kBandNote};
  if (lines.size() > study.headline.size()) section.figures = panels("layers", lines);
  return section;
}

Section rates_section(const Configurations& study) {
  const Group& headline = *study.headline.front();
  std::vector<Shape> lines;
  for (const Group& group : study.groups) {
    if (group.mixer == headline.mixer && group.layers == headline.layers) {
      lines.push_back({&group, "learning rate " + compact(group.lr), {}});
    }
  }
  for (std::size_t i = 0; i < lines.size(); ++i) lines[i].style = report::ramp_style(i, lines.size());
  Section section{
      "rates", "Learning rate", "figure 2 of the paper",
      "The same tests for " + headline.mixer + " alone, trained with different learning rates. " + kBandNote};
  if (lines.size() > 1) section.figures = panels("rates", lines);
  return section;
}

Section curves_section(const Configurations& study) {
  Figure accuracy{"curves-accuracy", "Test accuracy", "epoch", Figure::Unit::accuracy};
  Figure loss{"curves-loss", "Training loss", "step", Figure::Unit::loss};
  for (const Group* group : study.headline) {
    if (group->runs.empty()) continue;
    const auto style = study.style(group->mixer);
    accuracy.series.push_back({group->mixer, style, group->curve("epoch", "test_accuracy")});
    loss.series.push_back({group->mixer, style, group->curve("step", "train_loss")});
  }
  return {"curves",
          "Training",
          "",
          "Accuracy on the test images and loss on the training images (" + setting_of(*study.headline.front()) +
              "). " + kBandNote,
          {accuracy, loss}};
}

Section repeat_section(const Outcome& outcome) {
  Table table{"",
              {{"Run", false},
               {"Mixer", false},
               {"Layers"},
               {"Learning rate"},
               {"Seed"},
               {"Epochs"},
               {"Parameters"},
               {"Images/s"},
               {"Training, s"},
               {"Clean"}}};
  std::string commands;
  for (const json run : outcome.runs) {
    const auto number = [&](const char* key) { return report::number_of(run, key); };
    const auto text = [&](const char* key) { return report::text_of(run, key); };
    table.rows.push_back({text("name"), text("mixer"), text("layers"), compact(number("lr")), text("seed"),
                          text("epochs"), report::thousands(number("parameters")),
                          report::thousands(number("images_per_second")), report::thousands(number("train_seconds")),
                          run.value("diverged", false) ? "diverged" : report::percent(number("clean_accuracy"))});
    commands += text("command") + "\n";
  }
  auto section = report::how_to_repeat(outcome.command, outcome.environment, std::move(table));
  section.listings.push_back({"The command of each run", commands, true});
  return section;
}

// Returns "ahead for scale; within the spread for dropout and noise" of efla against deltanet.
std::string readings(const std::vector<Comparison>& all, const Spread (Comparison::*sides)[2]) {
  static constexpr std::array kWords{"ahead", "behind", "within the spread", "guessing, as deltanet is,"};
  std::string text;
  for (std::size_t i = 0; i < kWords.size(); ++i) {
    std::string tests;
    for (const auto& c : all) {
      if (static_cast<std::size_t>(verdict((c.*sides)[0], (c.*sides)[1])) != i) continue;
      tests += (tests.empty() ? "" : ", ") + std::string(eval::robustness_panels()[c.panel].name);
    }
    if (!tests.empty()) text += (text.empty() ? "" : "; ") + std::string(kWords[i]) + " for " + tests;
  }
  return text;
}

std::string summary(const Configurations& study) {
  std::string text;
  if (const auto pairs = pairs_of(study); !pairs.empty()) {
    const auto all = compare(*pairs.front().first, *pairs.front().second);
    text = "Figure 1 of the paper shows efla ahead of deltanet in every test. Here efla is, at the strongest level, " +
           readings(all, &Comparison::strongest) + "; in the mean over the levels, " +
           readings(all, &Comparison::mean) + ". ";
    if (pairs.front().first->runs.size() < 2) text += "With one seed there is no spread to judge differences by. ";
  }
  std::vector<std::string> clean;
  for (const Group* group : study.headline) {
    if (!group->runs.empty()) {
      clean.push_back(group->mixer + " " + in_percent(group->of("clean_accuracy")) + "\u00a0%");
    }
  }
  std::size_t runs = 0, diverged = 0;
  for (const Group& group : study.groups) {
    runs += group.seeds();
    diverged += group.diverged;
  }
  if (diverged > 0) {
    text += std::to_string(diverged) + " of " + std::to_string(runs) +
            " runs diverged; all figures are of the other runs. ";
  }
  if (clean.empty()) return text;
  return text + "On clean test images the accuracy is " + report::joined(clean, ", ") + " (" +
         setting_of(*study.headline.front()) + ").";
}

Configurations configurations_of(const json& settings, const std::vector<ordered_json>& runs) {
  Configurations study{settings.at("mixers"), groups_of(runs), {}};
  const auto place = [&](const Group& group) {
    return std::find(study.mixers.begin(), study.mixers.end(), group.mixer) - study.mixers.begin();
  };
  std::sort(study.groups.begin(), study.groups.end(), [&](const Group& a, const Group& b) {
    return std::tuple(place(a), a.layers, a.lr) < std::tuple(place(b), b.layers, b.lr);
  });
  const auto rates = settings.at("lr").get<std::vector<double>>();
  for (const auto& mixer : study.mixers) {
    study.headline.push_back(
        study.find(mixer, settings.at("layers").front(), *std::max_element(rates.begin(), rates.end())));
  }
  return study;
}

ordered_json scores_of(const std::vector<Group>& groups) {
  auto scores = ordered_json::array();
  for (std::size_t i = 0; i < kShown.size(); ++i) {
    const auto& panel = eval::robustness_panels()[i];
    for (const auto& group : groups) {
      ordered_json score{
          {"task", panel.name},     {"mixer", group.mixer},       {"layers", group.layers},           {"lr", group.lr},
          {"seeds", group.seeds()}, {"diverged", group.diverged}, {"accuracy", ordered_json::array()}};
      for (std::size_t level = 0; level < panel.levels.size(); ++level) {
        const Spread spread = group.accuracy(i, level);
        score["accuracy"].push_back({{std::string(panel.level_name), panel.levels[level]},
                                     {"mean", number_or_null(spread.mean)},
                                     {"std", number_or_null(spread.deviation)}});
      }
      scores.push_back(score);
    }
  }
  return scores;
}

}  // namespace

report::Report digit_report(const std::string& title, const json& settings, const Outcome& outcome) {
  const auto study = configurations_of(settings, outcome.runs);
  const bool builtin = settings.at("data") == "builtin";
  report::Report report{"efla reproduce smnist", builtin ? "Robustness on built-in digit sequences" : title};
  report.facts = {builtin ? "Built-in digits" : "Data: " + settings.at("data").get<std::string>(),
                  settings.at("train_images").dump() + " training images",
                  settings.at("test_images").dump() + " test images"};
  for (const char* key : {"cpu", "date"}) report.facts.push_back(report::text_of(json(outcome.environment), key));
  std::erase(report.facts, "");
  std::vector<std::string> caveats;
  if (builtin) caveats.push_back("The images are digits that the program draws itself, not MNIST.");
  if (settings.contains("caveat")) caveats.push_back(settings.at("caveat"));
  report.caveat = report::joined(caveats, " ");
  report.summary = summary(study);
  report.sections = {comparison_section(study), robustness_section(study), results_section(study),
                     layers_section(study),     rates_section(study),      curves_section(study),
                     repeat_section(outcome)};
  report.results = results_of("smnist", settings, outcome, scores_of(study.groups));
  return report;
}

}  // namespace efla::experiments
