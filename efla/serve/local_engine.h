// The engine over a model in this process: one thread that advances the texts of all requests step by step.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "efla/base/threads.h"
#include "efla/serve/engine.h"
#include "efla/serve/engine_model.h"
#include "efla/serve/job.h"
#include "efla/serve/prefix_cache.h"
#include "efla/serve/session_store.h"

namespace efla::serve {

// A step decodes one token of every reply and prefills as many ids of prompts as fit its time. These ids are
// distributed in pieces that end at multiples of nn::kCutTokens: each piece goes to the client that has waited longest,
// and to the request of this client that has waited longest. A request that begins therefore waits for the rest of one
// step, however long the other prompts are.
class LocalEngine final : public Engine {
 public:
  // Computes on the CPU.
  LocalEngine(const nn::LanguageModel& model, std::unique_ptr<data::Tokenizer> tokenizer, const EngineOptions& options);
  // model_sha256 and parameters: of the model that sessions belong to, whose weights are not rounded.
  LocalEngine(std::unique_ptr<EngineModel> model, std::string model_sha256, std::int64_t parameters,
              std::unique_ptr<data::Tokenizer> tokenizer, const EngineOptions& options);
  ~LocalEngine() override;

  EngineInfo info() const override { return info_; }
  RequestId submit(Request request, std::shared_ptr<Listener> listener) override;
  void cancel(RequestId id) override;
  std::vector<SessionInfo> sessions() const override { return store_.list(); }
  SessionInfo session(const std::string& name) const override { return store_.info(name); }
  void fork(const std::string& name, const std::string& copy) override { store_.fork(name, copy); }
  std::string save(const std::string& name) const override;
  void load(const std::string& name, std::string_view bytes) override;
  void erase(const std::string& name) override { store_.erase(name); }
  void make_disposable(const std::string& name) override { store_.make_disposable(name); }
  Statistics statistics() const override;

 private:
  using Jobs = std::list<std::unique_ptr<Job>>;

  // What a step computes: ids row by row, and the rows whose logits are needed.
  struct Row {
    Job* job;
    std::int64_t row;
    std::optional<std::int32_t> scored;  // otherwise the next token is drawn
    bool drafted = false;                // follows a draft's token; draws only if the reply has it
  };
  struct Step {
    std::vector<std::int32_t> ids;
    std::vector<nn::TextRun> runs;
    std::vector<Job*> jobs;  // of the runs
    std::vector<Row> rows;
    std::vector<std::size_t> drafts;  // the runs of several decoded tokens
  };

  void check(const Request& request) const;
  bool uses_cache(const Request& request, const StoredText* from) const;
  void require_places(std::int64_t places) const;
  static Replay prepare_rewind(Request& request, const StoredText* text);
  void run();
  void advance();
  void fail_running(const std::exception& error) noexcept;
  void end_cancelled_and_late();
  void admit();
  void begin(Job& job);
  Step plan();
  void decode_replies(Step& step);
  void distribute_prompts(Step& step);
  void end_drafts(const Step& step);
  std::int64_t piece_of(const Job& job, std::int64_t begin) const;
  std::int64_t prompt_tokens() const;
  void compute(const Step& step);
  void time_step(std::int64_t tokens, std::chrono::duration<double> time);
  void take_logits(std::span<const Row> rows);
  bool may_begin_next(const Step& step) const;
  void draw_on_gpu(std::span<const Row> rows, bool ahead);
  void take(Job& job, const Outcome& outcome);
  void cache_states(const Step& step);
  static void end_if_fed(Job& job);
  void keep_state(Job& job);
  void restore(std::int64_t slot, const StoredText* from);
  void close(Job& job);
  generate::SessionModel session_model() const;
  std::vector<io::NamedTensor> state_tensors(std::span<const float> state) const;
  std::shared_ptr<StoredText> text_after(const Job& job) const;
  void end(Jobs::iterator job);
  void forget_clients();

  const EngineOptions options_;
  const std::unique_ptr<data::Tokenizer> tokenizer_;
  const std::unique_ptr<EngineModel> model_;
  EngineInfo info_;
  std::int64_t drawable_;  // ids that the tokenizer has
  ThreadPool pool_;
  SessionStore store_;

  std::vector<std::int64_t> free_slots_;
  PrefixCache cache_;
  Jobs running_;
  std::uint64_t served_ = 0;
  std::chrono::duration<double> per_token_{0};  // time per token of a prompt; 0: not known yet
  std::map<std::string, std::uint64_t> client_served_;

  mutable std::mutex mutex_;  // guards the members that follow
  std::condition_variable changed_;
  Jobs waiting_;
  std::set<RequestId> alive_, cancelled_;
  RequestId next_id_ = 1;
  bool stopping_ = false;
  Statistics statistics_;

  std::thread thread_;  // last, because it uses all others
};

// Starts an engine over a model on the CPU. With options.on_gpu it moves the model to the GPU and rounds its weights.
std::unique_ptr<LocalEngine> start_engine(const std::shared_ptr<nn::LanguageModel>& model,
                                          std::unique_ptr<data::Tokenizer> tokenizer, const EngineOptions& options);

}  // namespace efla::serve
