#include "efla/data/tokenizers/tokenize.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "efla/base/error.h"
#include "efla/io/folder_lock.h"
#include "efla/io/json.h"

namespace efla::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kOperation = "data tokenize";
constexpr const char* kChanged = "changed_ns";
constexpr std::size_t kTextPerThread = std::size_t{1} << 19;  // bytes of text per thread and round

// Describes how a shard folder is made. A folder made in another way is refused. A file that changes but keeps its size
// and the time of its last change, in nanoseconds since 1970, is not noticed.
ordered_json describe_source(const std::vector<fs::path>& files, const TokenizeOptions& options) {
  ordered_json inputs = ordered_json::array();
  for (const auto& file : files) {
    const auto changed = std::chrono::file_clock::to_sys(fs::last_write_time(file)).time_since_epoch();
    inputs.push_back({{"path", file.string()},
                      {"bytes", fs::file_size(file)},
                      {kChanged, std::chrono::nanoseconds(changed).count()}});
  }
  return {{"field", options.format.field},
          {"separator", options.format.separator},
          {"bos", options.bos},
          {"shard_tokens", options.shard_tokens},
          {"inputs", std::move(inputs)}};
}

// Lists the input files. Refuses an output folder inside of an input, because the next call would read its shards as
// text.
std::vector<fs::path> inputs_outside(const fs::path& folder, const std::vector<std::string>& inputs) {
  auto files = list_inputs(inputs);  // first, because a pipe's path has no canonical form
  const auto out = fs::weakly_canonical(folder);
  for (const auto& input : inputs) {
    if (!fs::is_directory(input)) continue;
    const auto in = fs::canonical(input);
    if (std::mismatch(in.begin(), in.end(), out.begin(), out.end()).first == in.end()) {
      throw Error(kOperation, "out", folder.string() + ", inside the input " + input, "a folder outside of it");
    }
  }
  return files;
}

// Removes the shards and indices that a killed process left half-written, in a locked folder.
void remove_left_overs(const fs::path& folder) {
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const bool ours = name.starts_with(".index.json.") || name.starts_with(".shard-");
    if (ours && io::is_temporary_name(name)) left.push_back(entry.path());
  }
  for (const auto& path : left) fs::remove(path);
}

// Returns the folder's index, or an empty one if there is none. Throws Error if the folder was made in another way.
io::TokenIndex read_output(const fs::path& folder, const io::TokenizerInfo& tokenizer, const ordered_json& source) {
  if (!fs::exists(folder / io::kTokenIndexFile)) return {tokenizer, {}, source, io::TokenIndex::Position{}};
  auto index = io::read_token_index(folder);
  const auto refuse = [&](const std::string& what) {
    throw Error(kOperation, "out", fmt::format("{}, which was made with another {}", folder.string(), what),
                "the same arguments to resume, or a new folder");
  };
  if (index.tokenizer.fingerprint != tokenizer.fingerprint) refuse("tokenizer");
  const json before = index.source;
  json now = json::parse(io::to_json_text(source));  // as an index has it, whose text is UTF-8 where a path is not
  if (!before.contains(json::json_pointer(std::string("/inputs/0/") + kChanged))) {  // an index of an earlier version
    for (auto& input : now.at("inputs")) input.erase(kChanged);
  }
  for (const auto& [name, value] : now.items()) {
    if (before.value(name, json()) == value) continue;
    refuse(name == "inputs" ? "list of inputs, or their files have changed" : name);
  }
  index.source = source;  // with the keys in a new index's order, for the same bytes
  return index;
}

struct Job {
  DocumentPart part;
  std::vector<std::int32_t> ids;
};

class Tokenization {
 public:
  Tokenization(fs::path folder, const TokenizeOptions& options, const Tokenizer& tokenizer, ThreadPool& pool,
               const TokenizeEvents& events)
      : folder_(std::move(folder)),
        options_(options),
        tokenizer_(tokenizer),
        pool_(pool),
        events_(events),
        files_(inputs_outside(folder_, options.inputs)),
        reader_(files_, options.format, tokenizer) {}

  TokenizeEnd run() {
    const auto source = describe_source(files_, options_);
    // A complete folder needs no lock, which the user may not be able to write.
    if (!read_output(folder_, tokenizer_.info(), source).unfinished) {
      io::remove_stale_lock(folder_);
      return TokenizeEnd::was_complete;
    }
    const auto lock = io::prepare_output_folder(folder_, kOperation, io::kTokenIndexFile);
    remove_left_overs(folder_);
    index_ = read_output(folder_, tokenizer_.info(), source);  // another process may have changed the index meanwhile
    if (!index_.unfinished) return TokenizeEnd::was_complete;
    for (const auto& file : files_) progress_.size += fs::file_size(file);
    position_ = *index_.unfinished;
    reader_.skip_to(static_cast<std::size_t>(position_.input), position_.document);
    if (!tokenize_all()) return TokenizeEnd::stopped;
    if (writer_) end_shard();
    if (index_.shards.empty()) throw Error(kOperation, "inputs", "no text", "files with at least one document");
    index_.unfinished.reset();
    io::write_token_index(folder_, index_);
    return TokenizeEnd::complete;
  }

 private:
  // Runs rounds of jobs: while the pool tokenizes one round, one of its tasks reads the next. Returns false if stopped.
  bool tokenize_all() {
    std::vector<Job> now, next;
    read_round(now);
    while (!now.empty()) {
      next.clear();
      std::exception_ptr unreadable;
      pool_.run(static_cast<std::int64_t>(now.size()) + 1, [&](std::int64_t task, int) {
        if (task > 0) {
          auto& job = now[static_cast<std::size_t>(task - 1)];
          job.ids = tokenizer_.encode_part(job.part.text, job.part.first);
          return;
        }
        try {
          read_round(next);
        } catch (...) {
          unreadable = std::current_exception();  // thrown after the round before it is written
        }
      });
      for (const auto& job : now) write(job);
      if (events_.progress) events_.progress(progress_);
      if (unreadable) std::rethrow_exception(unreadable);
      if (events_.stop && events_.stop()) return false;
      std::swap(now, next);
    }
    return true;
  }

  void read_round(std::vector<Job>& jobs) {
    const auto enough = kTextPerThread * static_cast<std::size_t>(pool_.threads());
    DocumentPart part;
    for (std::size_t size = 0; size < enough && reader_.next(part); size += jobs.back().part.text.size()) {
      jobs.push_back({std::move(part), {}});
    }
    progress_.read = reader_.position();
  }

  void write(const Job& job) {
    if (!writer_) {
      const auto name = fmt::format("shard-{:05}.tokens", index_.shards.size());
      index_.shards.push_back({name, 0, 0, ""});
      writer_.emplace(folder_ / name, tokenizer_.info());
    }
    const auto before = writer_->tokens();
    const auto append = [&](std::int32_t id) { writer_->append({&id, 1}); };
    if (job.part.first && options_.bos) append(tokenizer_.bos());
    writer_->append(job.ids);
    if (job.part.last) append(tokenizer_.eos());
    progress_.text += job.part.text.size();
    progress_.tokens += writer_->tokens() - before;
    if (!job.part.last) return;
    writer_->end_document();
    ++progress_.documents;
    position_ = {static_cast<std::int64_t>(job.part.input), job.part.document + 1};
    if (writer_->tokens() >= options_.shard_tokens) end_shard();
  }

  // Renames the shard and then writes the index. If the process ends between the two, the next run writes the same
  // bytes again. The first shard needs an index before it, because a run recognises its folder by the index.
  void end_shard() {
    if (index_.shards.size() == 1)
      io::write_token_index(folder_, {index_.tokenizer, {}, index_.source, io::TokenIndex::Position{}});
    auto& shard = index_.shards.back();
    shard.tokens = writer_->tokens();
    shard.documents = writer_->documents();
    shard.sha256 = writer_->commit();
    writer_.reset();
    index_.unfinished = position_;
    io::write_token_index(folder_, index_);
  }

  fs::path folder_;
  const TokenizeOptions& options_;
  const Tokenizer& tokenizer_;
  ThreadPool& pool_;
  const TokenizeEvents& events_;
  std::vector<fs::path> files_;
  DocumentReader reader_;
  io::TokenIndex index_;
  std::optional<io::TokenShardWriter> writer_;
  io::TokenIndex::Position position_;  // after the last document that was written
  TokenizeProgress progress_;
};

}  // namespace

TokenizeEnd tokenize(const fs::path& folder, const TokenizeOptions& options, const Tokenizer& tokenizer,
                     ThreadPool& pool, const TokenizeEvents& events) {
  if (options.shard_tokens < 1) {
    throw Error(kOperation, "shard_tokens", std::to_string(options.shard_tokens), "at least 1");
  }
  if (options.format.separator.empty() || options.format.separator.find('\n') != std::string::npos) {
    throw Error(kOperation, "separator", "'" + options.format.separator + "'", "one line that is not empty");
  }
  if (tokenizer.eos() < 0)
    throw Error(kOperation, "tokenizer", "a tokenizer without eos",
                "one with eos (tokenizer_config.json names it for a tokenizer.json)");
  if (options.bos && tokenizer.bos() < 0) throw Error(kOperation, "bos", "a tokenizer without bos", "one with bos");
  return Tokenization(folder, options, tokenizer, pool, events).run();
}

}  // namespace efla::data
