#include "experiments/common/lm_runs.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "efla/io/content_error.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/report/html.h"

namespace efla::experiments {
namespace {

using nlohmann::json;
using report::compact;
using report::Figure;
using report::fixed;
using report::Line;
using report::number_of;
using report::Section;
using report::text_of;
using report::thousands;

constexpr std::size_t kPoints = 120;  // of a training curve
constexpr double kLastPart = 0.1;     // share of the steps whose mean is the final training loss

// A run's curves and the numbers of the table; NaN where there is none.
struct Run {
  std::string name;
  json file;
  Line loss, perplexity, bits_per_byte;
  double tokens = NAN, final_loss = NAN, tokens_per_second = NAN, seconds = NAN;
  std::string sample;
  std::map<std::string, std::string> settings, environment;  // "training.lr" → "0.001"
};

double last_of(const Line& line) { return line.empty() ? NAN : line.back().y.mean; }

report::Point point(double x, double y) { return {x, spread_of({&y, 1})}; }

// The losses of steps, and the tokens at which each was.
struct Losses {
  std::vector<double> tokens, values;

  explicit Losses(const std::vector<json>& metrics) {
    for (const json& line : metrics) {
      if (text_of(line, "event") != "step") continue;
      const double at = number_of(line, "tokens"), loss = number_of(line, "loss");
      if (!std::isfinite(at) || !std::isfinite(loss)) continue;
      tokens.push_back(at);
      values.push_back(loss);
    }
  }
  double mean(std::size_t first, std::size_t last) const { return spread_of({&values[first], last - first}).mean; }
};

void flatten(const std::string& path, const json& value, std::map<std::string, std::string>& into) {
  if (value.is_object()) {
    for (const auto& [key, below] : value.items()) flatten(path.empty() ? key : path + "." + key, below, into);
  } else {
    into[path] = value.is_number_float() ? compact(value.get<double>()) : report::string_of(value);
  }
}

Run read(const LmRunRecord& record) {
  Run run;
  run.name = record.name;
  run.file = record.run;
  std::vector<double> rates;
  for (const json& line : record.metrics) {
    const auto event = text_of(line, "event");
    const double tokens = number_of(line, "tokens"), loss = number_of(line, "loss");
    if (std::isfinite(tokens)) run.tokens = tokens;
    if (event == "step" && std::isfinite(tokens) && std::isfinite(loss)) {
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
  const Losses losses(record.metrics);
  const std::size_t n = losses.values.size();
  const auto last = static_cast<std::size_t>(std::ceil(static_cast<double>(n) * kLastPart));
  if (n > 0) run.final_loss = losses.mean(n - last, n);
  run.loss = loss_curve(record.metrics);
  run.tokens_per_second = median(rates);
  if (run.file.contains("config")) flatten("", run.file["config"], run.settings);
  if (run.file.contains("environment")) flatten("", run.file["environment"], run.environment);
  return run;
}

// Returns a chart of one line of every run that has it.
Figure chart(const std::vector<Run>& runs, const std::string& id, const std::string& title, Line Run::*line) {
  Figure figure{id, title, "tokens"};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!(runs[i].*line).empty()) figure.series.push_back({runs[i].name, report::category_style(i), runs[i].*line});
  }
  return figure;
}

Section curves_section(const std::vector<Run>& runs) {
  return {"curves",
          "Loss over tokens",
          "",
          "Training loss is the mean of neighbouring steps, before their updates. Compare perplexities between runs "
          "with the same validation tokens, and bits per byte between runs with the same validation text.",
          {chart(runs, "loss", "Training loss, nats per token", &Run::loss),
           chart(runs, "perplexity", "Validation perplexity per token", &Run::perplexity),
           chart(runs, "bits", "Validation, bits per byte", &Run::bits_per_byte)}};
}

Section results_section(const std::vector<Run>& runs) {
  report::Table table{"Results",
                      {{"Run", false},
                       {"Perplexity"},
                       {"Bits per byte"},
                       {"Training loss"},
                       {"Parameters"},
                       {"Tokens"},
                       {"Tokens/s"},
                       {"Training, s"}}};
  for (const Run& run : runs) {
    table.rows.push_back({run.name, fixed(last_of(run.perplexity), 3), fixed(last_of(run.bits_per_byte), 4),
                          fixed(run.final_loss, 4), thousands(number_of(run.file, "parameters")), thousands(run.tokens),
                          thousands(run.tokens_per_second), thousands(run.seconds)});
  }
  return {"results",
          "Results",
          "",
          "Perplexity and bits per byte come from the last evaluation. Training loss is the mean of the last tenth "
          "of the steps. Tokens per second are the median of the steps.",
          {},
          {table}};
}

// Appends a table of the keys whose values differ between runs, and a folded one of the keys that all runs share.
void add_differences(Section& section, const std::vector<Run>& runs, const std::string& what,
                     std::map<std::string, std::string> Run::*settings) {
  std::set<std::string> keys;
  for (const Run& run : runs) {
    for (const auto& [key, value] : run.*settings) keys.insert(key);
  }
  const auto value_of = [&](const Run& run, const std::string& key) {
    const auto found = (run.*settings).find(key);
    return found == (run.*settings).end() ? "–" : found->second;
  };
  report::Table differing{"Differences: " + what, {{"Run", false}}};
  report::Table common{runs.size() > 1 ? "Common to all runs: " + what : what, {{"Key", false}, {"Value", false}}};
  common.folded = true;
  for (const Run& run : runs) differing.rows.push_back({run.name});
  for (const auto& key : keys) {
    const auto first = value_of(runs.front(), key);
    if (std::all_of(runs.begin(), runs.end(), [&](const Run& run) { return value_of(run, key) == first; })) {
      common.rows.push_back({key, first});
      continue;
    }
    differing.columns.push_back({key, false});
    for (std::size_t i = 0; i < runs.size(); ++i) differing.rows[i].push_back(value_of(runs[i], key));
  }
  if (differing.columns.size() > 1) section.tables.push_back(differing);
  section.tables.push_back(common);
}

void check_run(const io::Fields& run) {
  run.get<std::string>("command");
  run.get<std::int64_t>("parameters", 0, INT64_MAX);
  run.object("config");
  run.object("environment");
}

// Checks a line of metrics. Numbers that are not finite are null; training stops before it writes such a loss.
void check_line(const io::Fields& line) {
  const auto event = line.get<std::string>("event");
  for (const char* count : {"step", "tokens"}) line.get<std::int64_t>(count, 0, INT64_MAX);
  line.get<double>("seconds");
  if (event == "step") {
    line.get<double>("loss");
    for (const char* number : {"lr", "grad_norm", "tokens_per_second"}) line.find<double>(number);
  } else if (event == "evaluation") {
    line.get<double>("loss");
    for (const char* number : {"perplexity", "bits_per_byte"}) line.find<double>(number);
  } else if (event == "sample") {
    line.get<std::string>("text");
  } else {
    line.refuse("event", "step, evaluation or sample");
  }
}

// Returns what a run was evaluated on. Runs that differ in this have perplexities that cannot be compared.
json evaluated_on(const Run& run) {
  const auto at = [&](const char* pointer) { return run.file.value(json::json_pointer(pointer), json()); };
  return {at("/data/validation"), at("/config/training/evaluate_tokens"), at("/config/training/sequence_length")};
}

// Returns a sentence: the run with the lowest perplexity, if the runs can be compared.
std::string summary(const std::vector<Run>& runs) {
  const Run* best = nullptr;
  for (const Run& run : runs) {
    if (run.perplexity.empty()) continue;
    if (best != nullptr && evaluated_on(run) != evaluated_on(*best)) {
      return "The runs were evaluated on different tokens, so their perplexities cannot be compared. Bits per byte "
             "can be compared if the tokens stand for the same text.";
    }
    if (best == nullptr || last_of(run.perplexity) < last_of(best->perplexity)) best = &run;
  }
  if (best == nullptr) return "";
  return (runs.size() == 1 ? "Validation perplexity " : best->name + " has the lowest validation perplexity: ") +
         fixed(last_of(best->perplexity), 3) + " per token after " + thousands(best->tokens) + " tokens.";
}

}  // namespace

LmRunRecord read_lm_run(const std::string& name, const std::filesystem::path& folder) {
  const std::string run = (folder / "run.json").string(), metrics = (folder / "metrics.jsonl").string();
  if (!std::filesystem::exists(run)) {
    throw IoError(IoError::Kind::missing, folder.string(), -1,
                  std::filesystem::exists(folder) ? "holds no run of efla train lm, which has a run.json"
                                                  : "there is no such folder");
  }
  LmRunRecord record{name, io::read_json(run), io::read_json_lines(metrics)};
  check_run({record.run, io::refuse_in_file(run)});
  std::int64_t number = 0;
  for (const json& line : record.metrics) {
    check_line({line, io::refuse_in_file(metrics, "line " + std::to_string(++number) + ": ")});
  }
  if (const auto text = io::read_file(metrics); !text.empty() && text.back() != '\n') {
    io::fail_at_line(metrics, number + 1, "is cut off, expected a newline at its end");
  }
  return record;
}

Line loss_curve(const std::vector<json>& metrics) {
  const Losses losses(metrics);
  const std::size_t n = losses.values.size(), parts = std::min(n, kPoints);
  Line line;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t first = n * i / parts, last = n * (i + 1) / parts;
    line.push_back(point(losses.tokens[last - 1], losses.mean(first, last)));
  }
  return line;
}

report::Report compare_lm_runs(const std::vector<LmRunRecord>& records) {
  std::vector<Run> runs;
  auto results = nlohmann::ordered_json::array();
  for (const auto& record : records) {
    runs.push_back(read(record));
    results.push_back({{"name", record.name}, {"run", record.run}, {"metrics", record.metrics}});
  }
  Section settings{"settings", "Configuration", "", ""}, samples{"samples", "Last samples", "", ""},
      repeat{"repeat", "How to repeat this", "", ""};
  add_differences(settings, runs, "configuration", &Run::settings);
  add_differences(repeat, runs, "environment", &Run::environment);
  for (const Run& run : runs) {
    samples.listings.push_back({run.name, run.sample});
    repeat.listings.push_back({run.name, text_of(run.file, "command")});
  }
  report::Report report{"efla report",
                        runs.size() == 1 ? "Training of " + runs.front().name : "Training runs compared"};
  report.summary = summary(runs);
  report.sections = {results_section(runs), curves_section(runs), settings, samples, repeat};
  report.results = results;
  return report;
}

}  // namespace efla::experiments
