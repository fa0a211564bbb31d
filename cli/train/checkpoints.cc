// efla import, efla export and efla logits: language models to and from Hugging Face's layout, and their parity.
#include <fmt/core.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/support/converted_types.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/model_tokenizer.h"
#include "cli/support/output_file.h"
#include "efla/base/error.h"
#include "efla/base/threads.h"
#include "efla/data/tokenizers/gguf_tokenizer.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/io/content_error.h"
#include "efla/io/file.h"
#include "efla/io/output_folder.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/safetensors/safetensors_folder.h"
#include "efla/nn/families/family_model.h"
#include "efla/nn/families/gguf_export.h"
#include "efla/nn/families/gpu_family_model.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/nn/models/language_model_json.h"
#include "efla/nn/named_tensor.h"
#include "efla/serve/chat/jinja_template.h"

namespace efla::cli {
namespace {

struct Arguments {
  std::string model, ids, out, gguf, gguf_type, device = "auto";
};

// The files that a tokenizer has in the folder of a model.
struct TokenizerFiles {
  std::vector<std::pair<std::string, std::string>> files;  // name and content
  std::string refusal;                                     // why there is none for transformers
};

// Returns the files of a tokenizer that exists: its own files, and the files made for transformers if `exported` is
// true or the tokenizer is bytes, which has no file of its own.
TokenizerFiles tokenizer_files(const std::string& tokenizer, bool exported) {
  TokenizerFiles result;
  if (exported || tokenizer == "bytes") {
    try {
      result.files = files_for_transformers(tokenizer);
    } catch (const IoError& error) {
      if (error.kind() == IoError::Kind::system) throw;  // the tokenizer may be fine
      result.refusal = error.what();
    }
  }
  if (tokenizer == "bytes") return result;
  for (auto& file : files_of_tokenizer(tokenizer)) {
    const auto is_same = [&](const auto& made) { return made.first == file.first; };
    if (std::none_of(result.files.begin(), result.files.end(), is_same)) result.files.push_back(std::move(file));
  }
  return result;
}

void convert(const std::string& command, const Arguments& arguments) {
  if (nn::is_family_folder(arguments.model)) {  // to import, because it is exported otherwise
    throw Error(command, "HF_DIR", arguments.model + ", a hybrid model",
                "a checkpoint of flash-linear-attention or efla: every command takes the folder of a hybrid as it is");
  }
  io::OutputFolder folder(arguments.out, command);  // refuses it before the model is read
  report_ignored_checkpoints(command.c_str(), arguments.model);
  const auto model = nn::load_language_model(arguments.model);
  // The tokenizer goes along, for the folder to be complete in itself. A run may name one that is elsewhere.
  const auto tokenizer = find_tokenizer(arguments.model);
  const bool exists = tokenizer == "bytes" || (!tokenizer.empty() && std::filesystem::exists(tokenizer));
  if (exists && command == "import") data::load_tokenizer(tokenizer);  // throws where it cannot be read
  const auto of_tokenizer = exists ? tokenizer_files(tokenizer, command == "export") : TokenizerFiles();
  nn::save_language_model(*model, folder.path());
  for (const auto& [name, text] : of_tokenizer.files) io::write_file_atomically(folder.path() / name, text);
  folder.commit();
  const auto& config = model->config();
  fmt::print("{}: {}, {} layers, {} parameters, model_type {}{}\n", arguments.out, config.mixer,
             config.num_hidden_layers, model->parameter_count(),
             nn::to_json(config).at("model_type").get<std::string>(),
             of_tokenizer.files.empty() ? "" : ", with its tokenizer");
  if (!of_tokenizer.refusal.empty()) fmt::print("without tokenizer.json: {}\n", of_tokenizer.refusal);
  if (!tokenizer.empty() && !exists) fmt::print("without its tokenizer: {} does not exist\n", tokenizer);
}

// Writes the folder of a model of a family as it is: the tensors with checksums, and the other files, but for hidden
// ones.
void export_family(const Arguments& arguments) {
  io::OutputFolder folder(arguments.out, "export");
  const nn::FamilyModel model(arguments.model, nn::WeightType::float32);  // throws where a part is missing
  io::SafetensorsFolder(arguments.model).write(folder.path());
  for (const auto& entry : std::filesystem::directory_iterator(arguments.model)) {
    const auto name = entry.path().filename();
    if (!entry.is_regular_file() || name.string().starts_with(".") || exists(folder.path() / name)) continue;
    io::write_file_atomically(folder.path() / name, io::MappedFile(entry.path()).bytes());
  }
  folder.commit();
  fmt::print("{}: {}, {} layers, {} parameters, as they were\n", arguments.out, model.config().family->model_type,
             model.config().layers(), model.parameters());
}

// Returns the entries of a GGUF file for the tokenizer and the chat template of a model's folder; none without them.
io::GgufEntries gguf_texts(const std::string& model, const nn::FamilyConfig& config) {
  io::GgufEntries entries{{"tokenizer.ggml.model", std::string("none")}};
  std::int64_t eos = -1;
  if (const auto tokenizer = find_tokenizer(model); !tokenizer.empty()) {
    entries = data::gguf_tokenizer_entries(tokenizer, config.vocab_size);
    eos = data::load_tokenizer(tokenizer)->eos();
  }
  for (const auto id : config.eos) {
    if (eos < 0) eos = id;
    if (id == eos) continue;
    entries.emplace_back("tokenizer.ggml.eot_token_id", static_cast<std::uint32_t>(id));
    break;
  }
  if (eos >= 0) entries.emplace_back("tokenizer.ggml.eos_token_id", static_cast<std::uint32_t>(eos));
  const auto source = serve::find_jinja_template(model);
  if (!source) return entries;
  std::vector<std::string> others;
  for (const auto& [name, text] : source->templates) {
    const bool usual = name == "default";
    if (!usual) others.push_back(name);
    entries.emplace_back(usual ? "tokenizer.chat_template" : "tokenizer.chat_template." + name, text);
  }
  if (!others.empty()) entries.emplace_back("tokenizer.chat_templates", others);
  return entries;
}

// Writes the model of a family as a GGUF file.
void export_as_gguf(const Arguments& arguments) {
  if (!nn::is_family_folder(arguments.model)) {
    throw Error("export", "RUN", arguments.model, "with --gguf the folder of a hybrid model");
  }
  if (!io::is_gguf(arguments.gguf)) throw Error("export", "--gguf", arguments.gguf, "a file name that ends with .gguf");
  check_output_file("export", "--gguf", arguments.gguf);
  const auto texts = gguf_texts(arguments.model, nn::load_family_config(arguments.model));
  const auto done = nn::export_gguf(arguments.model, arguments.gguf, arguments.gguf_type, texts);
  fmt::print("{}: {} parameters, weights in {}{}\n", arguments.gguf, done.parameters, done.type,
             done.skipped_tensors > 0 ? fmt::format(", without {} other tensors", done.skipped_tensors) : "");
}

// Returns input_ids [B, T] of the file.
torch::Tensor read_ids(const std::string& path) {
  const io::SafetensorsFile file(path);
  const auto* ids = file.find("input_ids");
  if (ids == nullptr) io::fail_in(file.path(), "has no tensor input_ids");
  if (ids->type != io::TensorType::I64 || ids->shape.size() != 2) {
    io::fail_in(file.path(), fmt::format("input_ids is {} with {} axes, expected I64 [B, T]", io::type_name(ids->type),
                                         ids->shape.size()));
  }
  const auto tensor = torch::empty(ids->shape, torch::kLong);
  std::memcpy(tensor.data_ptr(), ids->bytes.data(), ids->bytes.size());
  return tensor;
}

// Returns the logits [1, T, vocabulary] of one sequence by a model of a family, on the CPU and on a GPU. Both have one
// slot.
torch::Tensor family_logits(nn::FamilyModel& model, const torch::Tensor& ids, ThreadPool& pool) {
  const std::int64_t vocab = model.config().vocab_size, tokens = ids.numel();
  const auto logits = torch::empty({1, tokens, vocab});
  const auto* first = ids.data_ptr<std::int64_t>();
  const nn::TextRun run{.tokens = tokens};
  nn::RowBuffer buffer;
  const auto hidden = buffer.rows(tokens, model.config().hidden_size);
  model.clear(0);
  model.advance(std::vector<std::int32_t>(first, first + tokens), std::span(&run, 1), hidden, pool);
  model.logits(hidden, View<float, 2>::contiguous(logits.data_ptr<float>(), {tokens, vocab}), pool);
  return logits;
}
torch::Tensor family_logits(nn::GpuFamilyModel& model, const torch::Tensor& ids, ThreadPool& /*pool*/) {
  const nn::TextRun run{.tokens = ids.numel()};
  model.clear(0);
  const auto hidden = model.read(ids.to(model.device()), std::span(&run, 1));
  return model.logits(hidden).to(torch::kCPU).unsqueeze(0);
}

// Returns the logits [B, T, vocabulary] of a model of a family, one sequence at a time.
template <class Model>
torch::Tensor family_logits(Model&& model, const torch::Tensor& ids) {
  const std::int64_t vocab = model.config().vocab_size;
  if (ids.numel() > 0 && (ids.min().item<std::int64_t>() < 0 || ids.max().item<std::int64_t>() >= vocab)) {
    throw Error("logits", "--ids", "a token outside of the vocabulary", "0 to " + std::to_string(vocab - 1));
  }
  const auto logits = torch::empty({ids.size(0), ids.size(1), vocab});
  ThreadPool pool(available_processors());
  model.make_slots(1);
  for (std::int64_t b = 0; b < ids.size(0) && ids.size(1) > 0; ++b) {
    logits.narrow(0, b, 1).copy_(family_logits(model, ids[b], pool));
  }
  return logits;
}

torch::Tensor family_logits(const std::string& folder, const torch::Tensor& ids, torch::Device device) {
  constexpr auto kWeights = nn::WeightType::float32;
  if (device.is_cpu()) return family_logits(nn::FamilyModel(folder, kWeights), ids);
  return family_logits(nn::GpuFamilyModel(folder, kWeights, nn::load_family_config(folder).vocab_size, device), ids);
}

// Returns the logits of efla's own model.
torch::Tensor own_logits(const std::string& folder, const torch::Tensor& ids, torch::Device device) {
  const auto model = nn::load_language_model(folder, device);
  const torch::NoGradGuard no_grad;
  const auto logits = torch::empty({ids.size(0), ids.size(1), model->config().vocab_size});
  // Computes one sequence at a time, so that the activations need the memory of one.
  for (std::int64_t b = 0; b < ids.size(0); ++b) {
    logits.narrow(0, b, 1).copy_(model->logits(ids.narrow(0, b, 1)));
  }
  return logits;
}

void run_logits(const Arguments& arguments) {
  check_output_file("logits", "--out", arguments.out, arguments.ids);
  const torch::Device device = choose_model_device("logits", arguments.device, arguments.model);
  const auto ids = read_ids(arguments.ids);
  report_ignored_checkpoints("logits", arguments.model);
  report_converted_types("logits", arguments.model, nn::WeightType::float32);
  const auto logits = nn::is_family_folder(arguments.model) ? family_logits(arguments.model, ids, device)
                                                            : own_logits(arguments.model, ids.to(device), device);
  const auto entry = nn::named_tensor("logits", logits);
  io::write_safetensors(arguments.out, std::span(&entry, 1));
}

void add_import(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  auto* command =
      program.add_subcommand("import", "Read a language model in Hugging Face's layout into a folder of efla");
  command
      ->add_option("HF_DIR", arguments->model,
                   "Folder with config.json (model_type delta_net, gated_deltanet, kda, comba,\n"
                   "gated_deltaproduct or efla) and model.safetensors, or its shards with\n"
                   "model.safetensors.index.json")
      ->required()
      ->type_name("FOLDER");
  command->add_option("--out", arguments->out, "New folder for the model, in float32")->required()->type_name("RUN");
  command->callback([arguments] { convert("import", *arguments); });
}

void run_export(const Arguments& arguments) {
  if (arguments.out.empty() == arguments.gguf.empty()) {
    throw Error("export", "--out", arguments.out.empty() ? "neither it nor --gguf" : "both it and --gguf", "one");
  }
  if (io::is_gguf(arguments.model)) throw Error("export", "RUN", "the GGUF file " + arguments.model, "a folder");
  if (!arguments.gguf.empty()) return export_as_gguf(arguments);
  if (!arguments.gguf_type.empty()) throw Error("export", "--gguf-type", arguments.gguf_type, "--gguf with it");
  nn::is_family_folder(arguments.model) ? export_family(arguments) : convert("export", arguments);
}

void add_export(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  auto* command = program.add_subcommand("export", "Write a language model in Hugging Face's layout, or as GGUF");
  command
      ->add_option("RUN", arguments->model,
                   "Folder of a model, or of a training run (its latest checkpoint); the folder of a\n"
                   "hybrid model is written as it is, with checksums")
      ->required()
      ->type_name("FOLDER");
  command
      ->add_option("--out", arguments->out,
                   "New folder for config.json, model.safetensors, efla_model.py and, if there is\n"
                   "a tokenizer, its files and tokenizer.json with tokenizer_config.json")
      ->type_name("HF_DIR");
  command
      ->add_option("--gguf", arguments->gguf,
                   "GGUF file, NAME.gguf, for a hybrid model of Qwen3.5 without experts, with its\n"
                   "tokenizer and its chat template, instead of --out")
      ->type_name("FILE");
  command
      ->add_option("--gguf-type", arguments->gguf_type,
                   "Type of the file's weights of linear layers: F32, F16, BF16, Q8_0, or Q4_0 for MLPs\n"
                   "and Q8_0 for others; by default BF16 or F32, as the folder has them")
      ->check(CLI::IsMember({"F32", "F16", "BF16", "Q8_0", "Q4_0"}));
  command->callback([arguments] { run_export(*arguments); });
}

}  // namespace

void add_checkpoints(CLI::App& program) {
  add_import(program);
  add_export(program);
  auto arguments = std::make_shared<Arguments>();
  auto* logits = program.add_subcommand("logits", "A language model's logits for tokens in a file");
  logits->add_option("MODEL", arguments->model, "Folder of a model, GGUF file, or folder of a training run")
      ->required()
      ->type_name("FOLDER");
  logits->add_option("--ids", arguments->ids, "safetensors file with input_ids [B, T] of I64")
      ->required()
      ->type_name("FILE");
  logits->add_option("--out", arguments->out, "safetensors file to write logits [B, T, vocabulary] of F32 to")
      ->required()
      ->type_name("FILE");
  add_device_option(*logits, arguments->device);
  logits->callback([arguments] { run_logits(*arguments); });
}

}  // namespace efla::cli
