// The engine that continues texts, many at once over one model, for `efla generate`, `efla serve` and the samples of
// training. It knows nothing of HTTP, and its interface has no types of LibTorch.
//
//   auto engine = load_engine("model", data::load_tokenizer("model/tokenizer.model"));
//   Request request;
//   request.prompt = engine->info().tokenizer->encode("Once upon a time");
//   const RequestId id = engine->submit(std::move(request), listener);   // listener->token(…) …, listener->finish(…)
//   engine->cancel(id);
//
// A reply has the same bits whatever else the engine does at the time: it depends on the request, on the state that it
// starts from and on the model alone (docs/serving.md).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/request.h"

namespace efla::engine {

// A stored text: its model state, and what sampling needs to continue.
struct SessionInfo {
  std::string name;
  std::int64_t tokens = 0;      // of the text, prompts and replies
  std::int64_t rewindable = 0;  // tokens that a request can roll back
  std::int64_t pending = 0;     // of the tokens, the last ones that the state has not seen: 1 after most requests
  std::uint64_t seed = 0;       // of the last request
  std::uint64_t draws = 0;      // tokens drawn with this seed: RequestSampling::draws of this request, and its reply's
  std::int32_t last_id = -1;    // the last id of the text that stands for bytes; −1: none
  std::size_t bytes = 0;        // of memory or file
  bool in_memory = true;        // otherwise in a file of EngineOptions::swap
  bool in_use = false;          // by a request that will advance it
  bool disposable = false;
};

// Counts of values per bucket: counts[i] of values ≤ bounds[i] and above bounds[i − 1]; the last count has no bound.
struct Histogram {
  std::vector<double> bounds;
  std::vector<std::uint64_t> counts;
  double sum = 0.0;

  void add(double value) {
    ++counts[static_cast<std::size_t>(std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin())];
    sum += value;
  }
  std::uint64_t total() const { return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}); }
};

struct Statistics {
  std::int64_t slots = 0;                      // of state_memory; a request has one or two
  std::int64_t running = 0, queued = 0;        // replies that have a slot, and that wait for one
  std::int64_t sessions = 0;                   // stored
  std::int64_t pages = 0;                      // of state_memory, of keys and values; 0: the model needs none
  std::int64_t page_tokens = 0;                // tokens of a page
  std::int64_t used_pages = 0;                 // reserved for texts that run
  std::size_t slot_bytes = 0, page_bytes = 0;  // of one slot and of one page
  std::size_t session_bytes = 0;               // of stored sessions in memory
  std::size_t swapped_bytes = 0;               // of stored sessions in files
  std::size_t set_aside = 0;                   // files of sessions that could not be loaded at the start
  std::size_t cache_bytes = 0;                 // of the prefix cache
  std::int64_t cache_entries = 0;
  std::uint64_t cache_queries = 0, cache_hits = 0;  // tokens of prompts that may start from a cached state: all, and
                                                    // the ones that were found in the cache
  std::uint64_t prompt_tokens = 0, completion_tokens = 0;  // as Usage, of all requests so far
  std::uint64_t drafted_tokens = 0, accepted_tokens = 0;   // tokens of replies' drafts: all, and the drawn ones
  std::uint64_t steps = 0;                                 // of the engine's loop
  std::map<FinishReason, std::uint64_t> finished;          // replies by reason
  Histogram queue_seconds;                                 // from submit to a slot
  Histogram first_token_seconds;                           // from submit to the first token
  Histogram between_tokens_seconds;                        // from a token to the next of the same reply
};

struct EngineInfo {
  std::string model_sha256;        // of configuration and weights (not of how they are stored for decoding)
  std::string weights;             // "float32", "bfloat16", "int8" or "int4"
  std::string kv_cache_type = {};  // "float32" or "bfloat16"; empty: the state has no pages of keys and values
  std::int64_t parameters = 0, vocab_size = 0;
  std::int32_t bos = -1;                // −1: none. The engine adds no bos to a prompt
  std::vector<std::int32_t> ends = {};  // ids that end a text
  std::size_t session_bytes = 0;        // of the state of an empty text
  std::size_t token_bytes = 0;          // that each token of a text adds, in pages or not; 0 without softmax attention
  std::int64_t max_queue = 0;           // of EngineOptions: most places of a request
  const data::Tokenizer* tokenizer = nullptr;  // lives as long as the engine; threads may share it
};

// A request for more places than EngineOptions::max_queue has free.
class QueueFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A session that does not exist.
class NoSuchSession : public Error {
 public:
  using Error::Error;
};

// A session that a running request will advance.
class SessionInUse : public Error {
 public:
  using Error::Error;
};

// No room in EngineOptions::session_memory for one more session, counting what running requests will store; dropping
// disposable sessions would not free enough.
class NoRoom : public Error {
 public:
  using Error::Error;
};

// Returns whether a text is a name of sessions: 1 to 128 letters, digits and characters of "._-".
inline bool is_session_name(std::string_view text) {
  constexpr std::size_t kLongest = 128;
  return !text.empty() && text.size() <= kLongest && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
}

// Threads may call any function at once. Functions throw Error that names the argument ("session", "top_p", …).
class Engine {
 public:
  virtual ~Engine() = default;  // ends every request as cancelled

  virtual EngineInfo info() const = 0;

  // Checks and queues a request for one reply per listener, to the same prompt, which is read once: reply i is the
  // reply of a request whose seed is larger by i. Only the first listener gets the scores of the prompt and its Usage.
  // Throws Error (also for ids that the model does not have), QueueFull, NoSuchSession, SessionInUse, NoRoom; the
  // listeners then get no call.
  virtual RequestId submit(Request request, std::vector<std::shared_ptr<Listener>> listeners) = 0;
  RequestId submit(Request request, std::shared_ptr<Listener> listener) {
    return submit(std::move(request), std::vector{std::move(listener)});
  }

  // Ends the replies of a request before the next step, in the queue, in the prompt or in the reply: finish with
  // FinishReason::cancelled follows. Does nothing if the request is unknown or has ended.
  virtual void cancel(RequestId id) = 0;

  // Ends a request before the next step, in the prompt or in the reply: finish with FinishReason::interrupted follows,
  // and the text so far is stored under Request::save_as. A request in the queue is cancelled.
  virtual void interrupt(RequestId id) = 0;

  // Sessions, by a name for which is_session_name is true. Functions that read a session throw
  // NoSuchSession, functions that change it SessionInUse too.

  virtual std::vector<SessionInfo> sessions() const = 0;  // by name
  virtual SessionInfo session(const std::string& name) const = 0;
  // Stores a copy under a second name; both share the memory. Throws Error if `copy` exists.
  virtual void fork(const std::string& name, const std::string& copy) = 0;
  // Returns a session as the bytes of a file that `efla generate --load-session` reads too.
  virtual std::string save(const std::string& name) const = 0;
  // Stores a session from such bytes, in place of an older one. Throws IoError(content) for bytes that are not a
  // session, Error for a session of another model.
  virtual void load(const std::string& name, std::string_view bytes) = 0;
  // Do the same for a text that is not a session. The texts that are held count as stored sessions.
  virtual std::string save(const HeldText& text) const = 0;
  virtual HeldText read(std::string_view bytes) = 0;
  virtual void erase(const std::string& name) = 0;
  // Makes a session one that may be dropped, as Request::disposable does.
  virtual void make_disposable(const std::string& name) = 0;

  // Returns a sentence about each file in EngineOptions::sessions that the start has renamed, because it is damaged or
  // of another model.
  virtual std::vector<std::string> set_aside() const { return {}; }
  // Writes the sessions whose files could not be written before, for the end of the program. Throws std::runtime_error
  // where a file still cannot be written.
  virtual void keep_unwritten() {}

  virtual Statistics statistics() const = 0;
};

inline constexpr std::size_t kNoBound = SIZE_MAX;  // of memory

struct EngineOptions {
  std::size_t state_memory = std::size_t{1} << 30;  // bytes of the texts that run; refused if not one text fits
  std::int64_t max_texts = 1 << 16;                 // that run at once
  std::size_t session_memory = std::size_t{1}
                               << 30;  // bytes of stored sessions with their ids; the longest unused go to files
  std::size_t cache_memory = std::size_t{1} << 28;  // bytes of the prefix cache; 0: none
  std::filesystem::path swap = {};  // folder for sessions beyond session_memory; empty: disposable ones are dropped,
                                    // and a request that needs more room is refused
  // Folder in which sessions outlive the process, even if it is killed: a call that stores a session returns, and a
  // reply ends, after its file is written. Where that fails, the call throws std::runtime_error, or the reply ends with
  // FinishReason::error; the session is stored in memory all the same. Empty: sessions end with the engine.
  std::filesystem::path sessions = {};
  bool keep_sessions = true;  // false: no session is saved or loaded as bytes, so that the start need not compute
                              // EngineInfo::model_sha256
  bool on_gpu = false;  // compute on the first GPU, which also holds the slots; each text then takes twice its state,
                        // except with a model of a family
  std::string weights = "float32";  // of the linear layers: float32, bfloat16 or, on a CPU, int8 and int4
  // Of keys and values, where the model has pages: float32, bfloat16, or auto for float32. A session can only be
  // continued with the type that it was stored with.
  std::string kv_cache_type = "auto";
  std::int64_t draft_tokens = 7;  // most tokens drafted from repetitions in a text, computed together; 0 to 7; a GPU
                                  // takes no drafts
  std::int64_t draft_head = 0;    // most tokens drafted by the model's own head, 0 to 7, where they are more than the
                                  // ones from repetitions; not 0 only for a hybrid that has one, on a CPU
  std::int64_t step_tokens = 0;   // most tokens of prompts per step, a multiple of 64; 0: 512, and 8192 on a GPU
  std::chrono::milliseconds step_time{50};  // a step takes fewer tokens of prompts if more would take longer
  std::int64_t max_queue = 1024;            // requests that wait
  std::int64_t max_disposable = 256;        // stored sessions; the longest unused are dropped
  bool ends_texts = true;                   // false: EngineInfo::ends is empty, for measurements
  int threads = 0;                          // 0: one per processor
};

// Loads the model of a folder (as `efla generate MODEL`) and starts an engine. Throws IoError, and Error where the
// options are invalid, need more memory than the process may use, or the tokenizer has ids that the model does not
// have.
std::unique_ptr<Engine> load_engine(const std::filesystem::path& model,
                                    std::shared_ptr<const data::Tokenizer> tokenizer,
                                    const EngineOptions& options = {});

}  // namespace efla::engine
