#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "efla/base/printable.h"
#include "efla/serve/grammar/xgrammar_grammar.h"

namespace efla::serve {
namespace {

constexpr std::size_t kMostWaiting = 64, kMostKept = 256, kMostKeptBytes = std::size_t{256} << 20;
constexpr std::size_t kLongestReason = 300;       // bytes
constexpr std::chrono::seconds kLongestWait{30};  // because the grammars before may be slow

}  // namespace

class GrammarCompiler::Implementation {
 public:
  explicit Implementation(const data::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  ~Implementation() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void compile(GrammarSource source, Done done) {
    std::optional<Result> result;
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = kept_.find(source); found != kept_.end()) {
        used_.splice(used_.end(), used_, found->second.used);
        result = {.grammar = found->second.grammar};
      } else if (waiting_.size() >= kMostWaiting) {
        result = {.grammar = nullptr, .error = "too many grammars wait to be compiled", .is_busy = true};
      } else {
        if (!thread_.joinable()) thread_ = std::thread([this] { run(); });  // first, because it may fail
        waiting_.push_back({std::move(source), std::move(done), std::chrono::steady_clock::now()});
      }
    }
    changed_.notify_all();
    if (result) done(std::move(*result));
  }

 private:
  struct Waiting {
    GrammarSource source;
    Done done;
    std::chrono::steady_clock::time_point since;
  };
  struct Kept {
    std::shared_ptr<const Grammar> grammar;
    std::list<const GrammarSource*>::iterator used;
    std::size_t bytes;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto next = std::move(waiting_.front());
      waiting_.pop_front();
      try {
        auto result = result_of(next, lock);
        lock.unlock();
        next.done(std::move(result));
      } catch (const std::bad_alloc&) {  // the request ends with its connection
      }
      if (lock.owns_lock()) lock.unlock();
      next = {};
      lock.lock();
    }
  }

  // Does not hold the lock while it compiles.
  Result result_of(Waiting& next, std::unique_lock<std::mutex>& lock) {
    if (const auto found = kept_.find(next.source); found != kept_.end()) return {.grammar = found->second.grammar};
    if (stopping_) return {.grammar = nullptr, .error = "the server is stopping", .is_busy = true};
    if (std::chrono::steady_clock::now() - next.since > kLongestWait) {
      return {.grammar = nullptr, .error = "other grammars take too long to compile", .is_busy = true};
    }
    lock.unlock();
    auto result = compiled(next.source);
    lock.lock();
    if (result.grammar) keep(std::move(next.source), result.grammar);
    return result;
  }

  Result compiled(const GrammarSource& source) {
    try {
      if (!compiler_) compiler_.emplace(tokenizer_);
      return {.grammar = compiler_->compile(source)};
    } catch (const std::bad_alloc&) {
      return {.grammar = nullptr, .error = "not enough memory for the grammar", .is_busy = true};
    } catch (const std::exception& error) {
      return {.grammar = nullptr, .error = printable(error.what(), kLongestReason)};
    }
  }

  void keep(GrammarSource source, std::shared_ptr<const Grammar> grammar) {
    const auto bytes = grammar->bytes() + source.text.size();
    std::list<const GrammarSource*> used(1);  // before the key, because a kept source has a grammar
    const auto place = kept_.try_emplace(std::move(source)).first;
    used.front() = &place->first;
    place->second = {std::move(grammar), used.begin(), bytes};
    used_.splice(used_.end(), used);
    bytes_ += bytes;
    while (kept_.size() > 1 && (kept_.size() > kMostKept || bytes_ > kMostKeptBytes)) {
      const auto oldest = kept_.find(*used_.front());
      bytes_ -= oldest->second.bytes;
      used_.pop_front();
      kept_.erase(oldest);
    }
  }

  const data::Tokenizer& tokenizer_;
  std::optional<XGrammar> compiler_;  // of the thread
  std::mutex mutex_;                  // guards the members that follow
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  std::map<GrammarSource, Kept> kept_;
  std::list<const GrammarSource*> used_;  // keys of kept_, the longest unused first
  std::size_t bytes_ = 0;                 // of kept_
  bool stopping_ = false;
  std::thread thread_;  // starts with the first grammar
};

GrammarCompiler::GrammarCompiler(const data::Tokenizer& tokenizer)
    : implementation_(std::make_unique<Implementation>(tokenizer)) {}

GrammarCompiler::~GrammarCompiler() = default;

std::string GrammarCompiler::unavailable() { return {}; }

void GrammarCompiler::compile(GrammarSource source, Done done) {
  implementation_->compile(std::move(source), std::move(done));
}

}  // namespace efla::serve
