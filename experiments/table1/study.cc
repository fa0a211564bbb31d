#include "experiments/table1/study.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "efla/eval/lm_benchmark.h"
#include "efla/io/fields.h"
#include "efla/io/json.h"
#include "efla/report/html.h"
#include "efla/rule/mixer_preset.h"
#include "efla/train/tasks/lm_options.h"
#include "experiments/common/lm_runs.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using report::Table;
namespace fs = std::filesystem;

// A perplexity beyond float64 is null in the file.
double perplexity_of(const json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::infinity();
}
double loss_of(const json& run) { return perplexity_of(run.at("diverged") ? json() : run.at("perplexity")); }

// Returns the runs of a mixer that have the learning rate at which the first seed has the lowest perplexity.
std::vector<json> best_runs(const json& settings, const std::string& mixer, const std::vector<ordered_json>& entries) {
  std::vector<json> sweep, best;
  for (const json entry : entries) {
    if (entry.at("mixer") == mixer && entry.at("seed") == settings.at("seeds").front()) sweep.push_back(entry);
  }
  const json lr = std::min_element(sweep.begin(), sweep.end(), [](const json& a, const json& b) {
                    return loss_of(a) < loss_of(b);
                  })->at("lr");
  for (const json entry : entries) {
    if (entry.at("mixer") == mixer && entry.at("lr") == lr) best.push_back(entry);
  }
  return best;
}

// Returns the spread of the perplexities of the runs that did not diverge.
Spread perplexities_of(const std::vector<json>& runs) {
  std::vector<double> perplexities;
  for (const auto& run : runs) {
    if (!run.at("diverged").get<bool>()) perplexities.push_back(run.at("perplexity"));
  }
  return spread_of(perplexities);
}

// Returns the name of the GPU or the processor that a run was computed on.
std::string hardware_of(const json& run) {
  const json& environment = run.at("environment");
  if (run.at("device") == "cpu") return environment.at("cpu");
  const json& gpus = environment.at("gpus");
  return gpus.empty() ? "unknown" : gpus.front().at("name");
}

ordered_json entry_of(const std::string& name, const json& config, const LmOutcome& outcome, const fs::path& folder) {
  const auto run = read_lm_run(name, folder);
  const json& training = config.at("training");
  ordered_json entry{{"name", name},
                     {"mixer", config.at("model").at("mixer")},
                     {"lr", training.at("lr")},
                     {"seed", training.at("seed")},
                     {"parameters", run.run.at("parameters")},
                     {"hardware", hardware_of(run.run)},
                     {"diverged", true},
                     {"perplexity", nullptr}};
  entry["curve"] = ordered_json::array();
  for (const auto& point : loss_curve(run.metrics))
    entry["curve"].push_back({{"tokens", point.x}, {"loss", point.y.mean}});
  for (const auto& line : run.metrics) {
    entry["train_seconds"] = line.at("seconds");
    if (line.at("event") != "evaluation" || outcome.end == LmEnd::diverged || !line.at("perplexity").is_number())
      continue;
    for (const char* key : {"tokens", "perplexity", "bits_per_byte"}) entry[key] = line.value(key, json());
    entry["diverged"] = false;
  }
  if (!outcome.table_row.empty()) entry["table_1"] = outcome.table_row;
  return entry;
}

StudyRun run_of(const json& settings, const fs::path& tokens, const json& mixer, const json& lr, const json& seed,
                const TrainLm& train) {
  json config = settings.at("config");
  config["model"]["mixer"] = mixer;
  config["data"]["train"] = (tokens / "train").string();
  config["data"]["validation"] = (tokens / "validation").string();
  config["training"]["lr"] = lr;
  config["training"]["min_lr"] = lr.get<double>() / 10.0;
  config["training"]["seed"] = seed;
  mixer_preset(mixer.get<std::string>());
  train::lm_options_from_json({config, io::refuse_argument("reproduce table1")});  // throws for what cannot be run
  const auto name = mixer.get<std::string>() + "-lr" + report::compact(lr) + "-seed" + seed.dump();
  return {name, nullptr, [=](const fs::path& folder, const RunContext& context) -> std::optional<ordered_json> {
            const LmOutcome outcome = train(config, folder, context);
            if (outcome.end == LmEnd::stopped) return {};
            return entry_of(name, config, outcome, folder);
          }};
}

void check_model_entry(const io::Fields& entry) {
  for (const char* name : {"mixer", "hardware"}) entry.get<std::string>(name);
  for (const char* name : {"lr", "parameters"}) entry.get<double>(name);
  entry.get<std::uint64_t>("seed");
  if (!entry.get<bool>("diverged")) entry.get<double>("perplexity");
  for (const auto& point : entry.objects("curve")) {
    for (const char* name : {"tokens", "loss"}) point.get<double>(name);
  }
  if (entry.find("table_1") != nullptr) entry.object("table_1");
}

std::string perplexity_text(const json& value) {
  return value.is_null() ? "diverged" : report::fixed(value.get<double>(), 3);
}

Table ranking_table(const ordered_json& scores, const std::vector<ordered_json>& runs) {
  Table table{"Validation perplexity",
              {{"Mixer", false}, {"Learning rate"}, {"Perplexity"}, {"Standard error"}, {"Seeds", false}}};
  for (const auto& score : scores) {
    std::vector<std::string> seeds;
    for (const auto& run : runs) {
      if (run.at("mixer") == score.at("mixer") && run.at("lr") == score.at("lr")) {
        seeds.push_back(perplexity_text(run.at("perplexity")));
      }
    }
    table.rows.push_back({score.at("mixer"), report::compact(score.at("lr")), perplexity_text(score.at("perplexity")),
                          report::fixed(report::number_of(score, "standard_error"), 3), report::joined(seeds, ", ")});
  }
  return table;
}

// Returns a number of table 1 as the paper writes it: a perplexity, or an accuracy in per cent.
std::string cell_of(const std::string& column, const json& mean, const json& standard_error) {
  if (mean.is_null()) return "–";
  const bool perplexity = column.ends_with("perplexity");
  const double scale = perplexity ? 1.0 : 100.0;
  const int digits = perplexity ? 2 : 1;
  const std::string text = report::fixed(mean.get<double>() * scale, digits);
  if (standard_error.is_null()) return text;
  return text + " ± " + report::fixed(standard_error.get<double>() * scale, digits);
}

// Returns table 1 of these models, and below it the paper's rows. Without scored tasks it has no rows.
Table tasks_table(const json& settings, const ordered_json& scores) {
  const auto columns = eval::table_columns();
  Table table{"Table 1", {{"Mixer", false}}};
  for (const auto& column : columns) table.columns.push_back({column});
  for (const json score : scores) {
    if (score.at("table_1").empty()) continue;
    auto& row = table.rows.emplace_back(1, score.at("mixer").get<std::string>());
    for (const auto& column : columns) {
      const json& value = score.at("table_1").value(column, json::object());
      row.push_back(cell_of(column, value.value("mean", json()), value.value("standard_error", json())));
    }
  }
  if (table.rows.empty()) return table;
  for (const auto& [name, numbers] : settings.at("paper").items()) {
    auto& row = table.rows.emplace_back(1, name + ", paper");
    for (std::size_t i = 0; i < columns.size(); ++i) {
      row.push_back(report::fixed(numbers.at(i), columns[i].ends_with("perplexity") ? 2 : 1));
    }
  }
  return table;
}

Table rates_table(const json& settings, const ordered_json& scores, const std::vector<ordered_json>& runs) {
  Table table{"Validation perplexity of the first seed by learning rate", {{"Mixer", false}}};
  std::vector<double> rates = settings.at("lr");
  std::sort(rates.begin(), rates.end());
  for (const double lr : rates) table.columns.push_back({report::compact(lr)});
  for (const auto& score : scores) {
    auto& row = table.rows.emplace_back(1, score.at("mixer").get<std::string>());
    for (const double lr : rates) {
      const auto run = std::find_if(runs.begin(), runs.end(), [&](const ordered_json& entry) {
        return entry.at("mixer") == score.at("mixer") && entry.at("lr") == lr &&
               json(entry.at("seed")) == settings.at("seeds").front();
      });
      row.push_back(perplexity_text(run->at("perplexity")));
    }
  }
  return table;
}

// Returns the training loss of the first seed at each mixer's best learning rate.
report::Figure loss_figure(const ordered_json& scores, const std::vector<ordered_json>& runs) {
  report::Figure figure{"loss", "Training loss, nats per token", "tokens"};
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const auto run = std::find_if(runs.begin(), runs.end(), [&](const ordered_json& entry) {
      return entry.at("mixer") == scores[i].at("mixer") && entry.at("lr") == scores[i].at("lr");
    });
    report::Line line;
    for (const auto& point : run->at("curve")) {
      const double loss = point.at("loss");
      line.push_back({point.at("tokens"), spread_of({&loss, 1})});
    }
    figure.series.push_back({scores[i].at("mixer"), report::category_style(i), line});
  }
  return figure;
}

// Returns how the perplexities of efla and deltanet differ; empty if the study lacks one of them or all its runs
// diverged.
std::string summary(const json& settings, const std::vector<ordered_json>& runs) {
  const auto mixers = settings.at("mixers").get<std::vector<std::string>>();
  std::vector<Spread> sides;
  for (const char* mixer : {"efla", "deltanet"}) {
    if (std::find(mixers.begin(), mixers.end(), mixer) == mixers.end()) return "";
    sides.push_back(perplexities_of(best_runs(settings, mixer, runs)));
    if (sides.back().count == 0) return "";
  }
  const Spread &efla = sides[0], &deltanet = sides[1];
  const double difference = efla.mean / deltanet.mean - 1.0;
  const bool has_spread = efla.count > 1 && deltanet.count > 1;
  std::string text = "The perplexity of efla is " + report::percent(std::abs(difference)) +
                     (difference < 0 ? " below" : " above") + " that of deltanet";
  if (has_spread) {
    text += beyond_spread(efla, deltanet) ? ", beyond the spread of the seeds" : ", within the spread of the seeds";
  }
  text += ": " + report::plus_minus(efla, 1.0, 3) + " against " + report::plus_minus(deltanet, 1.0, 3);
  if (!has_spread) return text + ". With one seed there is no spread to judge the difference by.";
  return text + " (mean ± standard deviation over " + std::to_string(efla.count) + " and " +
         std::to_string(deltanet.count) +
         " runs; lower is better). A difference is called beyond the spread if it is larger than the two deviations "
         "together.";
}

report::Report table1_report(const Plan& plan, const Outcome& outcome) {
  const json& settings = plan.settings();
  const auto& runs = outcome.runs;
  const auto scores = score_models(settings, runs);
  Table all{"", {{"Run", false}, {"Parameters"}, {"Hardware", false}, {"Training, s"}, {"Perplexity"}}};
  for (const json run : runs) {
    all.rows.push_back({run.at("name"), report::thousands(run.at("parameters")), run.at("hardware"),
                        report::thousands(report::number_of(run, "train_seconds")),
                        perplexity_text(run.at("perplexity"))});
  }
  report::Report report{"efla reproduce " + plan.study(), plan.title()};
  report.caveat = settings.value("caveat", "");
  report.summary = summary(settings, runs);
  report.results = results_of(plan.study(), settings, outcome, scores);
  report.sections = {
      {"tasks",
       "Zero-shot on the ten tasks",
       "table 1 of the paper",
       "Mean ± standard error over the seeds at each mixer’s best learning rate, which was chosen on other text. "
       "Accuracies are in per cent. The paper’s models have 340 million parameters and 8 billion tokens of other text.",
       {},
       {tasks_table(settings, scores)}},
      {"ranking",
       "Perplexity on the validation tokens",
       "",
       "Mean over the seeds at each mixer’s best learning rate. The standard error is that of the mean, from the "
       "spread of the seeds. The learning rate was chosen on these tokens, for every mixer alike.",
       {loss_figure(scores, runs)},
       {ranking_table(scores, runs), rates_table(settings, scores, runs)}},
      report::how_to_repeat(outcome.command, outcome.environment, std::move(all))};
  return report;
}

// Returns mean and standard error over the runs of each column of table 1 that they have.
ordered_json score_tasks(const std::vector<json>& runs) {
  auto scores = ordered_json::object();
  for (const auto& column : eval::table_columns()) {
    std::vector<double> values;
    for (const auto& run : runs) {
      const json row = run.value("table_1", json::object());
      if (row.contains(column) && row.at(column).is_number()) values.push_back(row.at(column));
    }
    if (values.empty()) continue;
    const Spread spread = spread_of(values);
    scores[column] = {{"mean", number_or_null(spread.mean)},
                      {"standard_error", number_or_null(standard_error(spread))}};
  }
  return scores;
}

}  // namespace

ordered_json score_models(const json& settings, const std::vector<ordered_json>& runs) {
  std::vector<ordered_json> scores;
  for (const std::string mixer : settings.at("mixers")) {
    auto seeds = ordered_json::array();
    const auto best = best_runs(settings, mixer, runs);
    for (const auto& run : best) seeds.emplace_back(run.at("seed"));
    const Spread spread = perplexities_of(best);
    scores.push_back({{"mixer", mixer},
                      {"lr", best.front().at("lr")},
                      {"seeds", seeds},
                      {"diverged", best.size() - static_cast<std::size_t>(spread.count)},
                      {"perplexity", number_or_null(spread.mean)},
                      {"standard_error", number_or_null(standard_error(spread))},
                      {"table_1", score_tasks(best)}});
  }
  const auto place = [](const ordered_json& score) {
    return score.at("perplexity").is_null() ? std::numeric_limits<double>::infinity()
                                            : score.at("perplexity").get<double>();
  };
  std::stable_sort(scores.begin(), scores.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
  return scores;
}

Study table1_study(const Plan& plan, const LmTokens& tokens, const TrainLm& train) {
  const json settings = plan.settings();
  const fs::path folder = fs::absolute(tokens.folder).lexically_normal();
  // A run's name and these settings say all about the run.
  json agreed = settings;
  for (const char* selection : {"mixers", "lr", "seeds"}) agreed.erase(selection);
  agreed["config"].erase("data");  // paths, which may differ between machines that compute parts of one study
  agreed["tokens"] = tokens.description;
  Study study{plan.study(), agreed, {}, {}, {}, {}};
  for (const json& lr : settings.at("lr")) {
    for (const json& mixer : settings.at("mixers")) {
      study.runs.push_back(run_of(settings, folder, mixer, lr, settings.at("seeds").front(), train));
    }
  }
  study.more = [=](const std::vector<ordered_json>& entries) {
    std::vector<StudyRun> runs;
    for (std::size_t i = 1; i < settings.at("seeds").size(); ++i) {
      for (const json& mixer : settings.at("mixers")) {
        const json lr = best_runs(settings, mixer, entries).front().at("lr");
        runs.push_back(run_of(settings, folder, mixer, lr, settings.at("seeds")[i], train));
      }
    }
    return runs;
  };
  study.brief = [](const ordered_json& entry) {
    return "validation perplexity " + perplexity_text(entry.at("perplexity"));
  };
  study.fills_gpu = true;
  study.check = check_model_entry;
  study.report = [plan](const Outcome& outcome) { return table1_report(plan, outcome); };
  return study;
}

}  // namespace efla::experiments
