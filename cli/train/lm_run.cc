#include "cli/train/lm_run.h"

#include <fmt/core.h>

#include "cli/support/environment.h"
#include "cli/support/model_tokenizer.h"
#include "cli/support/reply_receiver.h"
#include "efla/base/check.h"
#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/engine/local_engine.h"
#include "efla/eval/language_model_scorer.h"
#include "efla/eval/lm_benchmark.h"
#include "efla/io/fields.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/io/sha256.h"
#include "efla/io/toml.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/torch/context.h"
#include "efla/train/checkpoint.h"
#include "efla/train/tasks/lm_evaluate.h"

namespace efla::cli {
namespace {

using nlohmann::json;

nn::LanguageModelConfig model_config(const io::Fields& config, const io::TokenFolder& corpus) {
  const json* given = config.find("model");
  json table = given != nullptr ? *given : json::object();
  const bool is_whole = table.is_object() && table.contains("model_type");
  if (table.is_object() && !is_whole) {
    const io::TokenizerInfo& tokenizer = corpus.tokenizer();
    if (!table.contains("vocab_size")) table["vocab_size"] = tokenizer.vocab_size;
    if (!table.contains("bos_token_id") && tokenizer.bos >= 0) table["bos_token_id"] = tokenizer.bos;
    // Without an eos no token ends a text; the field's default is a token of other tokenizers.
    if (!table.contains("eos_token_id")) table["eos_token_id"] = tokenizer.eos >= 0 ? json(tokenizer.eos) : json();
  }
  const auto fields = config.within("model", table);
  return is_whole ? nn::language_model_config_from_json(fields) : nn::language_model_config_from_table(fields);
}

// Returns a path as run.json and checkpoints keep it. Throws Error for one that JSON cannot hold.
std::string absolute(const char* field, const std::string& path) {
  if (path.empty()) return path;
  auto full = std::filesystem::absolute(path).lexically_normal().string();
  if (utf8_prefix(full) != full.size()) throw Error(kTrainLm, field, full, "a path that is UTF-8");
  return full;
}

// Returns a setting with quotes around its value, because a shell takes quotes away: TABLE.KEY='efla' for
// TABLE.KEY=efla. A value with quotes or brackets stays as it is.
std::string quoted_setting(const std::string& setting) {
  const auto equals = setting.find('=');
  if (equals == std::string::npos) {
    throw Error(kTrainLm, "--set", "'" + setting + "'", "TABLE.KEY=VALUE, as in training.lr=1e-3");
  }
  const auto first = setting.find_first_not_of(' ', equals + 1);
  if (first == std::string::npos) {
    throw Error(kTrainLm, "--set", "'" + setting + "'",
                "a value; for an empty text --set '" + setting.substr(0, equals) + "=\"\"'");
  }
  const std::string value = setting.substr(first);
  return value.find_first_of("'\"[]{}\n") != std::string::npos ? setting
                                                               : setting.substr(0, equals) + "='" + value + "'";
}

json parse_setting(const std::string& setting) {
  const std::string name = "--set " + setting, quoted = quoted_setting(setting);
  try {
    return io::parse_toml(setting, name);
  } catch (const IoError&) {
    return io::parse_toml(quoted, name);
  }
}

}  // namespace

json read_configuration(const std::string& path, const std::vector<std::string>& settings) {
  json config = io::read_toml(path);
  for (const std::string& setting : settings) {
    config.merge_patch(parse_setting(setting));
  }
  return config;
}

json resumed_configuration(const std::filesystem::path& run_file, const std::vector<std::string>& settings) {
  const json recorded = io::read_json(run_file);
  json config = io::Fields(recorded, io::refuse_in_file(run_file.string())).object("config").content();
  for (const std::string& setting : settings) {
    const json parsed = parse_setting(setting);
    if (train::without_places(parsed) != json{{"data", json::object()}}) {
      throw Error(kTrainLm, "--set", "'" + setting + "'",
                  "data.train, data.validation or data.tokenizer: a resumed run keeps its configuration");
    }
    config.merge_patch(parsed);
  }
  return config;
}

LmSetup::LmSetup(const io::Fields& config, bool resumed) : options_(train::lm_options_from_json(config)) {
  read_data(resumed);
  model_config_ = model_config(config, *train_);
  const std::int64_t least = train_->tokenizer().vocab_size;
  const Require require(kTrainLm);
  config.check([&] {
    require(model_config_.vocab_size >= least, "model.vocab_size", model_config_.vocab_size,
            "at least " + std::to_string(least) + ", the vocabulary of " + options_.data.train);
  });
  check_events(resumed);
  // Training does not notice most damage to the tokens, and would stop late at the rest.
  train_->verify();
  if (validation_) validation_->verify();
}

void LmSetup::read_data(bool resumed) {
  // Returns open(). If the data of a resumed run is no longer there, the Error says how to name its place.
  const auto open_place = [&](const std::string& field, const std::string& place, const auto& open) {
    try {
      return open(place);
    } catch (const IoError& error) {
      if (!resumed || error.kind() != IoError::Kind::missing) throw;
      throw Error(kTrainLm, field, place + ", which is not there any more",
                  "the place of the same data, with --set " + field + "=PLACE");
    }
  };
  const auto open_tokens = [&](const std::string& field, const std::string& place) {
    return open_place(field, place, [](const std::string& path) { return std::make_unique<io::TokenFolder>(path); });
  };
  train::LmDataOptions& data = options_.data;
  data.train = absolute("data.train", data.train);
  data.validation = absolute("data.validation", data.validation);
  if (data.tokenizer != "bytes") data.tokenizer = absolute("data.tokenizer", data.tokenizer);
  train_ = open_tokens("data.train", data.train);
  if (!data.validation.empty()) {
    validation_ = open_tokens("data.validation", data.validation);
    data::require_same_tokenizer(train_->tokenizer(), validation_->tokenizer(), kTrainLm);
  }
  if (!data.tokenizer.empty()) {
    tokenizer_ = open_place("data.tokenizer", data.tokenizer, data::load_tokenizer);
    data::require_same_tokenizer(train_->tokenizer(), tokenizer_->info(), kTrainLm);
  }
}

void LmSetup::check_events(bool resumed) const {
  const auto require_targets = [&](const char* field, const std::string& place, const io::TokenFolder& tokens,
                                   std::int64_t used) {
    if (train::has_targets(tokens, options_.training.sequence_length, used)) return;
    throw Error(kTrainLm, field, place + ", whose documents have one token each",
                "a document of at least two tokens, because a document's first token is not predicted");
  };
  require_targets("data.train", options_.data.train, *train_, 0);
  if (validation_) {
    require_targets("data.validation", options_.data.validation, *validation_, options_.training.evaluate_tokens);
  }
  if (options_.training.sample_every > 0 && sample_prompt().empty() && !resumed) {
    throw Error(kTrainLm, "training.sample_prompt", "\"\"", "a prompt: the tokenizer has no bos");
  }
}

json LmSetup::full() const {
  json config = train::to_json(options_);
  config["model"] = nn::to_json(model_config_);
  return config;
}

json LmSetup::tokenizer_description() const { return tokenizer_of_run(train_->tokenizer()); }

json LmSetup::data_description() const {
  json description = {{"train", describe_tokens(*train_)}};
  if (validation_) description["validation"] = describe_tokens(*validation_);
  return description;
}

train::LmReplica LmSetup::make_replica() {
  const auto model = std::make_shared<nn::LanguageModel>(model_config_, nn::Initialiser(options_.training.seed));
  model->set_recompute(options_.training.recompute);
  models_.push_back(model);
  return train::replica_of(model);
}

std::int64_t LmSetup::parameter_count() const { return models_.front()->parameter_count(); }

nlohmann::ordered_json LmSetup::score(const std::vector<data::LmTask>& tasks, ThreadPool& pool,
                                      const eval::ScoreEvents& events) const {
  if (!tokenizer_) throw Error(kTrainLm, "data.tokenizer", "\"\"", "the tokenizer, which the tasks need");
  const eval::LmEvalOptions options;
  const auto scorer = eval::make_scorer(*models_.front());
  std::vector<eval::LmTaskResult> results;
  for (const auto& task : tasks) {
    const auto requests = eval::lm_task_requests(task, *tokenizer_, options.text, pool);
    results.push_back(eval::evaluate_lm_task(task, requests, scorer, options.batch_tokens, pool, events));
  }
  return eval::table_row(results);
}

// Returns the tokenizer's files that let transformers load a checkpoint; none if transformers has no such tokenizer.
std::vector<std::pair<std::string, std::string>> LmSetup::tokenizer_files() const {
  const std::string& name = options_.data.tokenizer;
  if (name.empty() && train_->tokenizer().name != "bytes") return {};
  try {
    return files_for_transformers(name.empty() ? "bytes" : name);
  } catch (const IoError& error) {
    if (error.kind() == IoError::Kind::system) throw;  // the tokenizer may be fine
    return {};
  }
}

train::LmFiles LmSetup::files() {
  train::LmFiles files;
  files.write = [this, tokenizer = tokenizer_files()](const std::filesystem::path& folder) {
    nn::save_language_model(*models_.front(), folder);
    for (const auto& [name, text] : tokenizer) io::write_file_atomically(folder / name, text);
  };
  files.sample = [this] { return sample(); };
  return files;
}

train::LmData LmSetup::run_data() const {
  train::LmData data{train_.get(), validation_.get(), {}};
  if (!tokenizer_) return data;
  for (std::int32_t id = 0; id < tokenizer_->vocab_size(); ++id) {
    data.token_bytes.bytes.push_back(static_cast<std::int64_t>(tokenizer_->bytes_of(id).size()));
    if (tokenizer_->begins_with_added_space(id)) data.token_bytes.space_after = tokenizer_->bos();
  }
  return data;
}

train::RunOptions LmSetup::run_options() const {
  auto run = train::run_options(options_.training, validation_ != nullptr);
  if (run.sample_every > 0 && sample_prompt().empty()) run.sample_every = 0;
  return run;
}

std::vector<std::int32_t> LmSetup::sample_prompt() const {
  auto ids = tokenizer_->encode(options_.training.sample_prompt);
  if (tokenizer_->bos() >= 0) ids.insert(ids.begin(), tokenizer_->bos());
  return ids;
}

// Returns the text that greedy decoding adds to sample_prompt.
std::string LmSetup::sample() const {
  engine::EngineOptions options;
  options.keep_sessions = false;
  options.state_memory = engine::kNoBound;
  options.cache_memory = 0;
  options.max_texts = options.threads = 1;
  engine::LocalEngine engine(engine::make_torch_model(models_.front()), "", parameter_count(), tokenizer_, options);
  engine::Request request;
  request.prompt = sample_prompt();
  request.max_tokens = options_.training.sample_tokens;
  request.sampling.temperature = 0.0;
  const auto receiver = std::make_shared<ReplyReceiver>();
  engine.submit(std::move(request), receiver);
  return receiver->whole();
}

void update_places(const std::filesystem::path& folder, const LmSetup& setup) {
  const auto path = folder / train::kRunFile;
  const auto text = io::read_file(path);
  auto run = nlohmann::ordered_json::parse(text.begin(), text.end());
  const json data = setup.full().at("data");
  if (json(run.at("config").at("data")) == data) return;
  for (const auto& [field, place] : data.items()) run["config"]["data"][field] = place;
  io::write_file_atomically(path, io::to_json_text(run));
}

void write_run_file(const std::filesystem::path& folder, const LmSetup& setup, int processes, int threads,
                    const std::string& device) {
  const nlohmann::ordered_json run = {{"format", "efla language model run 1"},
                                      {"command", command_line()},
                                      {"config", setup.full()},
                                      {"data", setup.data_description()},
                                      {"tokenizer", setup.tokenizer_description()},
                                      {"parameters", setup.parameter_count()},
                                      {"processes", processes},
                                      {"threads", threads},
                                      {"device", device},
                                      {"environment", environment()}};
  io::write_file_atomically(folder / train::kRunFile, io::to_json_text(run));
}

namespace {

experiments::LmOutcome train_and_score(const json& config, const std::vector<data::LmTask>& tasks,
                                       const std::filesystem::path& folder, const experiments::RunContext& context) {
  const torch::Device device = libtorch::torch_device(context.device);
  LmSetup setup(io::Fields(config, io::refuse_argument("reproduce table1")));
  const auto& options = setup.options().training;
  const auto group = train::ProcessGroup::join({}, torch::kCPU);
  train::LmTask task([&] { return setup.make_replica(); }, setup.run_data(), options, *group, device, setup.files());
  train::DataParallel model(
      1, [&] { return task.add_copy(); }, context.pool, device, options.precision);
  if (const auto file = folder / train::kRunFile; std::filesystem::exists(file)) {
    // The tokens must be those that the run began with.
    const json recorded = io::read_json(file);
    const auto data = io::Fields(recorded, io::refuse_in_file(file.string())).object("data");
    io::require_same({{"data", setup.data_description()}}, {{"data", data.content()}}, "reproduce", file.string());
  } else {
    write_run_file(folder, setup, 1, 1, context.device.is_cpu() ? "cpu" : "cuda");
  }
  train::RunEvents events;
  events.stop = context.stop;
  events.step = [&](const train::StepResult& step, double) {
    context.progress(static_cast<double>(step.step) / static_cast<double>(options.total_steps()),
                     fmt::format("loss {:.4f}", step.loss));
  };
  const train::Run run{folder, setup.full(), setup.run_options()};
  try {
    const auto end = train::train_in_folder(run, task, model, train::update_options(options), *group, events);
    if (end == train::RunEnd::stopped) return {experiments::LmEnd::stopped};
    if (tasks.empty()) return {experiments::LmEnd::finished};
    const auto precision = model.use_precision();
    const eval::ScoreEvents scoring{context.stop, [&](std::int64_t done, std::int64_t all) {
                                      context.progress(1.0, fmt::format("scored {} of {}", done, all));
                                    }};
    return {experiments::LmEnd::finished, setup.score(tasks, context.pool, scoring)};
  } catch (const train::NonFinite&) {
    return {experiments::LmEnd::diverged};
  } catch (const Stopped&) {
    return {experiments::LmEnd::stopped};
  }
}

}  // namespace

json describe_tokens(const io::TokenFolder& folder) {
  std::string shards;
  for (const auto& shard : folder.index().shards) shards += shard.sha256;
  return {{"tokens", folder.tokens()},
          {"documents", folder.documents()},
          {"sha256", io::sha256(io::as_bytes(shards))},
          {"tokenizer", folder.tokenizer().name}};
}

experiments::TrainLm train_lm_of_study(const std::vector<data::LmTask>& tasks) {
  return [tasks](const json& config, const std::filesystem::path& folder, const experiments::RunContext& context) {
    return train_and_score(config, tasks, folder, context);
  };
}

}  // namespace efla::cli
