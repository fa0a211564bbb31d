#include "cli/data/tokens.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "cli/support/interrupt.h"
#include "cli/support/progress_bar.h"
#include "cli/support/threads.h"
#include "efla/base/threads.h"
#include "efla/data/tokenizers/tokenize.h"

namespace efla::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMega = 1e6;
constexpr int kPlainLines = 10;

struct TokenizeArguments {
  data::TokenizeOptions options;
  std::string tokenizer, out;
  int threads = 0;
};

// "[====>   ] 40 %  41.2 MB of text, 12.3 MB/s, 3.10 million tokens/s, 0:06 left"
class TokenizeReport {
 public:
  void operator()(const data::TokenizeProgress& progress) {
    last_ = progress;
    const double seconds = std::max(this->seconds(), 1e-9);
    // A resumed run starts where the previous one stopped.
    if (first_read_ < 0) first_read_ = static_cast<double>(progress.read);
    const auto read = static_cast<double>(progress.read), size = std::max(static_cast<double>(progress.size), 1.0);
    const double speed = (read - first_read_) / std::max(seconds - first_seconds_, 1e-9);
    if (first_seconds_ == 0.0) first_seconds_ = seconds;
    const double share = std::min(read / size, 1.0);
    const auto left = speed > 0.0 ? fmt::format(", {} left", duration((size - read) / speed)) : "";
    const int tenth = static_cast<int>(share * kPlainLines);
    bar_.draw(share, fmt::format("{:.1f} MB of text, {}{}", static_cast<double>(progress.text) / kMega, rates(), left),
              tenth > tenths_);
    tenths_ = tenth;
  }

  std::string rates() const {
    const double seconds = std::max(this->seconds(), 1e-9);
    return fmt::format("{:.1f} MB/s, {:.2f} million tokens/s", static_cast<double>(last_.text) / kMega / seconds,
                       static_cast<double>(last_.tokens) / kMega / seconds);
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  void clear() { bar_.clear(); }

 private:
  ProgressBar bar_{"tokenize"};
  Clock::time_point start_ = Clock::now();
  data::TokenizeProgress last_;
  double first_read_ = -1.0, first_seconds_ = 0.0;
  int tenths_ = 0;
};

void print_contents(const io::TokenIndex& index, const std::string& folder, const std::string& more) {
  fmt::print("{}: {} tokens of {} document{} in {} shard{}, tokenizer {} ({} tokens){}\n", folder, index.tokens(),
             index.documents(), index.documents() == 1 ? "" : "s", index.shards.size(),
             index.shards.size() == 1 ? "" : "s", index.tokenizer.name, index.tokenizer.vocab_size, more);
}

void tokenize(const TokenizeArguments& arguments) {
  const auto tokenizer = data::load_tokenizer(arguments.tokenizer);
  ThreadPool pool(arguments.threads > 0 ? arguments.threads : available_processors());
  watch_for_interrupts();
  TokenizeReport report;
  data::TokenizeEnd end{};
  try {
    end = data::tokenize(arguments.out, arguments.options, *tokenizer, pool, {std::ref(report), interrupted});
  } catch (...) {
    report.clear();  // the message begins a line of its own
    throw;
  }
  report.clear();
  if (end == data::TokenizeEnd::stopped) {
    end_interrupted("Stopped; whole shards are kept. To resume: the same command again.");
  }
  const auto index = io::read_token_index(arguments.out);
  const bool was_there = end == data::TokenizeEnd::was_complete;
  print_contents(
      index, arguments.out,
      was_there ? "; it was complete already" : fmt::format("; {:.1f} s, {}", report.seconds(), report.rates()));
}

void verify(const std::string& folder) {
  const io::TokenFolder tokens(folder);
  tokens.verify();
  print_contents(tokens.index(), folder, "; every checksum is right");
}

}  // namespace

void add_token_commands(CLI::App& data) {
  const auto arguments = std::make_shared<TokenizeArguments>();
  auto& options = arguments->options;
  auto* tokenize_command = data.add_subcommand(
      "tokenize",
      "Turn text into token shards; resumes to the same bytes after an interruption (docs/token-shards.md)");
  tokenize_command
      ->add_option("INPUT", options.inputs,
                   "Text or JSON lines (.jsonl, .json), also .gz, .xz, .zst; or a folder of them")
      ->required()
      ->type_name("PATH")
      ->take_all();
  tokenize_command
      ->add_option("--tokenizer", arguments->tokenizer,
                   "A SentencePiece model, a tokenizer.json, a GGUF file, or bytes")
      ->required();
  tokenize_command->add_option("--out", arguments->out, "Folder for the shards; created if it does not exist")
      ->required();
  tokenize_command
      ->add_option("--shard-tokens", options.shard_tokens, "A shard ends with the document that reaches this number")
      ->capture_default_str();
  tokenize_command->add_option("--field", options.format.field, "Field of a JSON line that holds the text")
      ->capture_default_str();
  tokenize_command->add_option("--separator", options.format.separator, "Line between two documents of a text file")
      ->capture_default_str();
  tokenize_command->add_flag("--bos", options.bos, "Put bos before each document; eos always follows it");
  add_threads_option(*tokenize_command, arguments->threads);
  tokenize_command->callback([arguments] { tokenize(*arguments); });

  const auto folder = std::make_shared<std::string>();
  auto* verify_command = data.add_subcommand("verify", "Read token shards whole and check every checksum and token");
  verify_command->add_option("TOKENS", *folder, "Folder of efla data tokenize")->required()->type_name("FOLDER");
  verify_command->callback([folder] { verify(*folder); });
}

}  // namespace efla::cli
