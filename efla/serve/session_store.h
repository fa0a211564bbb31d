// Stored texts by name: immutable, shared by forks, in memory or swapped to files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "efla/generate/session_record.h"
#include "efla/serve/engine.h"

namespace efla::serve {

// The floats of a model's state. They never change, but may move to a file.
class StoredState {
 public:
  explicit StoredState(std::vector<float> values) : values_(std::move(values)), size_(values_.size()) {}
  ~StoredState();
  StoredState(const StoredState&) = delete;
  StoredState& operator=(const StoredState&) = delete;

  std::size_t bytes() const { return size_ * sizeof(float); }
  bool in_memory() const;
  // Copies the values, from the file if they are there. Throws IoError.
  void copy_to(std::span<float> to) const;
  // Moves the values to a new file of the folder. Throws IoError; the values then stay in memory.
  void swap_out(const std::filesystem::path& folder);

 private:
  mutable std::mutex mutex_;
  std::vector<float> values_;
  std::size_t size_;
  std::filesystem::path file_;
};

// A text between two requests. Its last id may be pending: the state has not seen it.
struct StoredText {
  std::shared_ptr<StoredState> state;  // null: of an empty text
  generate::SessionRecord record;      // counters[2]: tokens in the state

  // What rewinding needs: the text before the last request, the ids that followed (first its pending ones), how many of
  // these were prefilled, and how many then decoded; the others were prefilled again.
  std::shared_ptr<const StoredText> before;  // without a `before` of its own
  std::vector<std::int32_t> since;
  std::size_t prefilled = 0, decoded = 0;

  std::int64_t state_tokens() const { return static_cast<std::int64_t>(record.counters[2]); }
  std::int64_t tokens() const { return state_tokens() + static_cast<std::int64_t>(record.pending.size()); }
  std::int64_t rewindable() const { return before ? tokens() - before->tokens() : 0; }
};

// Functions may be called by several threads at once.
class SessionStore {
 public:
  // Files are written to swap_folder, unless it is empty, when states take more than `memory` bytes.
  SessionStore(std::size_t memory, std::filesystem::path swap_folder);

  // Throw NoSuchSession, SessionInUse and, for a name that is not one, Error.
  std::shared_ptr<const StoredText> get(const std::string& name);         // counts as a use
  std::shared_ptr<const StoredText> peek(const std::string& name) const;  // does not
  void put(const std::string& name, std::shared_ptr<const StoredText> text);
  void fork(const std::string& name, const std::string& copy);
  void erase(const std::string& name);

  // Reserves a name for a request that will put it, until release. Throws Error if there is no room and no folder.
  void reserve(const std::string& name, std::size_t bytes);
  // Stores the text, unless it is null, and ends the reservation.
  void release(const std::string& name, std::shared_ptr<const StoredText> text);

  std::vector<SessionInfo> list() const;
  SessionInfo info(const std::string& name) const;
  // Bytes of all states, in memory and in files.
  std::pair<std::size_t, std::size_t> bytes() const;

 private:
  struct Entry {
    std::shared_ptr<const StoredText> text;
    std::uint64_t used = 0;
  };
  SessionInfo info_of(const std::string& name, const Entry& entry) const;
  std::pair<std::size_t, std::size_t> bytes_locked() const;
  Entry& find(const std::string& name);
  const Entry& peek_locked(const std::string& name) const;
  void require_room(std::size_t bytes) const;
  void require_free(const std::string& name) const;
  void make_room();

  std::size_t memory_;
  std::filesystem::path swap_folder_;
  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::size_t> reserved_;  // bytes that will be stored under a name
  std::uint64_t now_ = 0;
};

}  // namespace efla::serve
