// Stored texts by name: they never change, forks share them, and they are in memory or in files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/engine/session_record.h"
#include "efla/engine/stored.h"
#include "efla/io/folder_lock.h"

namespace efla::engine {

// A text between two requests. Its last id may be pending: the state has not seen it.
struct StoredText {
  std::shared_ptr<StoredState> state;  // null: of an empty text
  SessionRecord record;                // counters[2]: tokens in the state

  // What rewinding needs; none for a disposable text and for one that was loaded.
  std::shared_ptr<const StoredText> before;  // the text before the last request, without a `before` of its own
  std::shared_ptr<StoredIds> since;          // the pending ids of `before`, then the ids of the last request
  std::size_t prefilled = 0;                 // the number of ids of `since` that were prefilled first
  std::size_t decoded = 0;  // the number of ids after these that were decoded; the others were prefilled

  CountedBytes counted;  // of the records

  std::int64_t state_tokens() const { return static_cast<std::int64_t>(record.counters[2]); }
  std::int64_t tokens() const { return state_tokens() + static_cast<std::int64_t>(record.pending.size()); }
  std::int64_t rewindable() const { return before ? tokens() - before->tokens() : 0; }
  // Returns the bytes of the records, which no other text shares and which never move to files.
  std::size_t record_bytes() const;
  // Calls f with everything that may move to a file, except that pages may come twice.
  template <class F>
  void for_each_part(F&& f) const {
    if (state) state->for_each_part(f);
    if (before && before->state) before->state->for_each_part(f);
    if (since) f(*since);
  }
};

// Bounds the bytes of stored states, ids and records in memory together with the bytes that reservations promise. A
// caller that needs room moves the longest unused texts to files, without the pages that later used texts in memory
// have too, or, without a folder for files, drops disposable texts. A page counts once, however many texts have it.
// Several threads may call functions at once; a thread that writes a file does not keep others waiting.
class SessionStore {
 public:
  // swap: the folder for files; empty: none. Makes the folder if it does not exist, locks it, and removes files that a
  // killed process left. max_disposable: most disposable texts. Throws Error if swap is not a folder or another process
  // uses it, and IoError.
  SessionStore(std::size_t memory, std::filesystem::path swap, std::int64_t max_disposable);

  // Throw NoSuchSession, SessionInUse and, for a text that is no session's name, Error; put and reserve also throw
  // NoRoom and IoError.
  std::shared_ptr<const StoredText> get(const std::string& name);         // counts as a use
  std::shared_ptr<const StoredText> peek(const std::string& name) const;  // is not a use
  void put(const std::string& name, std::shared_ptr<StoredText> text);
  void fork(const std::string& name, const std::string& copy);
  void erase(const std::string& name);
  void make_disposable(const std::string& name);

  // Reserves a name for a request that will store this many bytes under it, until release.
  void reserve(const std::string& name, std::size_t bytes);
  // Stores the text, unless it is null, and ends the reservation. With a folder reservations together may promise more
  // than the bound: the longest unused texts then move to files. A text stays in memory where writing its file fails,
  // and the next caller that needs room gets the IoError. Throws std::bad_alloc without memory for the entry; an older
  // text of the name then stays.
  void release(const std::string& name, std::shared_ptr<StoredText> text, bool disposable);

  std::vector<SessionInfo> list() const;
  SessionInfo info(const std::string& name) const;
  std::int64_t size() const;
  const StoredBytes& bytes() const { return *bytes_; }
  // Returns a state that can be stored, with the pages that stored states share.
  std::shared_ptr<StoredState> stored(const nn::TextState& state) const {
    return std::make_shared<StoredState>(state, pages_);
  }

 private:
  struct Entry {
    std::shared_ptr<const StoredText> text;
    std::uint64_t used = 0;
    bool disposable = false;
  };
  using Entries = std::map<std::string, Entry>;

  SessionInfo info_of(const std::string& name, const Entry& entry) const;
  Entries::iterator find(const std::string& name);
  Entries::const_iterator find(const std::string& name) const;
  void require_free(const std::string& name) const;
  void use(Entries::iterator entry);
  void store(const std::string& name, std::shared_ptr<StoredText> text, bool disposable);
  void drop(Entries::iterator entry);
  void drop_surplus();
  bool has_room() const;
  void make_room(std::unique_lock<std::mutex>& lock);
  void swap_until(const std::function<bool()>& enough, std::unique_lock<std::mutex>& lock);
  void swap(const std::string& name, std::uint64_t used, std::unique_lock<std::mutex>& lock);
  std::unordered_set<const void*> pages_used_after(std::uint64_t used) const;
  void drop_disposable();
  [[noreturn]] void refuse_room() const;

  const std::size_t memory_;
  const std::filesystem::path swap_folder_;
  std::optional<io::FolderLock> swap_lock_;
  const std::int64_t max_disposable_;
  const std::shared_ptr<StoredBytes> bytes_ = std::make_shared<StoredBytes>();
  const std::shared_ptr<StoredPages> pages_ = std::make_shared<StoredPages>();
  mutable std::mutex mutex_;  // guards the members that follow
  Entries entries_;
  // Entries by use, the longest unused first: entries that have not moved to files, and disposable entries.
  std::map<std::uint64_t, std::string> in_memory_, disposable_;
  std::map<std::string, std::size_t> reserved_;  // bytes that will be stored under a name
  std::size_t promised_ = 0;                     // bytes of reservations
  std::uint64_t now_ = 0;
};

}  // namespace efla::engine
