// The engine over a model in this process: one thread that advances the texts of all requests step by step.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "efla/base/threads.h"
#include "efla/engine/engine.h"
#include "efla/engine/model.h"
#include "efla/engine/prefix_cache.h"
#include "efla/engine/reply.h"
#include "efla/engine/schedule.h"
#include "efla/engine/session_store.h"

namespace efla::engine {

// How many texts run at once, and the pages that they share.
struct Room {
  std::int64_t slots = 0, pages = 0;
};

// Divides options.state_memory. Where texts grow, at most half of it goes to their constant parts. Throws Error where
// not one text fits, and where the process may not use as much memory as all options together allow.
Room room_of(const EngineOptions& options, const EngineModel& model);

class LocalEngine final : public Engine {
 public:
  // Computes on the CPU.
  LocalEngine(const nn::LanguageModel& model, std::shared_ptr<const data::Tokenizer> tokenizer,
              const EngineOptions& options);
  // model_sha256 and parameters: of the model that sessions belong to, whose weights are not rounded.
  LocalEngine(std::unique_ptr<EngineModel> model, std::string model_sha256, std::int64_t parameters,
              std::shared_ptr<const data::Tokenizer> tokenizer, const EngineOptions& options);
  ~LocalEngine() override;

  EngineInfo info() const override { return info_; }
  using Engine::submit;
  RequestId submit(Request request, std::vector<std::shared_ptr<Listener>> listeners) override;
  void cancel(RequestId id) override { ask(id, cancelled_); }
  void interrupt(RequestId id) override { ask(id, interrupted_); }
  std::vector<SessionInfo> sessions() const override { return store_.list(); }
  SessionInfo session(const std::string& name) const override { return store_.info(name); }
  void fork(const std::string& name, const std::string& copy) override { store_.fork(name, copy); }
  std::string save(const std::string& name) const override { return store_.format().bytes(*store_.peek(name)); }
  void load(const std::string& name, std::string_view bytes) override { store_.load(name, bytes); }
  std::string save(const HeldText& text) const override;
  HeldText read(std::string_view bytes) override { return held_text(store_.read(bytes)); }
  std::vector<std::string> set_aside() const override;
  void keep_unwritten() override;
  void erase(const std::string& name) override { store_.erase(name); }
  void make_disposable(const std::string& name) override { store_.make_disposable(name); }
  Statistics statistics() const override;

 private:
  using Replies = std::list<std::unique_ptr<Reply>>;

  // What a step computes: ids row by row, and the rows whose logits are needed.
  struct Row {
    Reply* reply;
    std::int64_t row;
    std::optional<std::int32_t> scored;  // otherwise the next token is drawn
    bool drafted = false;                // follows a draft's token; draws only if the reply has it
  };
  struct Step {
    Clock::time_point start;
    std::vector<std::int32_t> ids;
    std::vector<nn::TextRun> runs;
    std::vector<Reply*> replies;  // of the runs
    std::vector<Row> rows;
    std::vector<std::size_t> drafts;  // the runs of several decoded tokens
    std::int64_t drafted_by_head = 0;
  };

  // The engine's thread (local_engine.cc).
  void run();
  void advance();
  void fail_running(const std::exception& error) noexcept;

  // Requests (local_requests.cc).
  void check(const Request& request, std::size_t replies) const;
  bool uses_cache(const Reply& reply) const;
  void require_places(std::int64_t places) const;
  void ask(RequestId id, std::set<RequestId>& asked);
  void end_asked_and_late();
  void admit();
  void begin(Reply& reply);
  void restore(std::int64_t slot, const StoredText* from);
  void close(Reply& reply);
  void end_if_over(Replies::iterator reply);
  void end(Replies::iterator reply);
  void count_end(const Reply& reply);

  // Memory (local_memory.cc).
  std::size_t state_bytes(std::int64_t tokens) const;
  std::size_t most_stored_bytes(const Reply& reply) const;
  std::int64_t pages_of(const Reply& reply) const;
  void require_pages(const Reply& reply) const;
  std::int64_t pages_to_begin(const Reply& reply) const;
  void take_memory(Reply& reply);
  void hold_pages(Reply& reply, const std::vector<const void*>& pages);
  void free_memory(Reply& reply);

  // Steps (local_step.cc).
  Step plan();
  void decode_replies(Step& step);
  void read_prompts(Step& step);
  void compute(const Step& step);
  void take_logits(std::span<const Row> rows);
  bool may_begin_next(const Step& step) const;
  void draw_by_model(std::span<const Row> rows, bool ahead);
  void take(Reply& reply, const Outcome& outcome);
  void fork_replies(Reply& reply, std::span<const float> logits);
  void keep_state(Reply& reply);
  void end_drafts(const Step& step);
  void learn_cost(const Step& step);
  void cache_states(const Step& step);

  // Sessions (local_sessions.cc).
  static Replay prepare_rewind(Request& request, const StoredText* text);
  static HeldText held_text(std::shared_ptr<const StoredText> text);
  std::shared_ptr<StoredText> text_after(const Reply& reply) const;

  const EngineOptions options_;
  const std::shared_ptr<const data::Tokenizer> tokenizer_;
  const std::unique_ptr<EngineModel> model_;
  const Capabilities capabilities_;
  const TextMemory text_memory_;
  const bool shares_pages_;  // whether texts do
  const EngineInfo info_;
  std::int64_t drawable_;  // ids that the tokenizer has
  ThreadPool pool_;
  SessionStore store_;

  std::vector<std::int64_t> free_slots_;
  std::int64_t free_pages_ = 0, pages_ = 0;             // pages_: all
  std::unordered_map<const void*, std::int64_t> held_;  // how many running texts hold a page that they began with
  PrefixCache cache_;
  Schedule schedule_;
  DraftCost draft_cost_;
  Replies running_;

  mutable std::mutex mutex_;  // guards the members that follow
  std::condition_variable changed_;
  Replies waiting_;
  std::map<RequestId, std::int64_t> alive_;  // replies that have not ended
  std::set<RequestId> cancelled_, interrupted_;
  RequestId next_id_ = 1;
  bool stopping_ = false;
  Statistics statistics_;

  std::thread thread_;  // last, because it uses all others
};

// Starts an engine over a model. With options.on_gpu it moves the model to the GPU and rounds its weights.
std::unique_ptr<LocalEngine> start_engine(const std::shared_ptr<nn::LanguageModel>& model,
                                          std::shared_ptr<const data::Tokenizer> tokenizer,
                                          const EngineOptions& options);

}  // namespace efla::engine
