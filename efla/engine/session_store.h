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
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/engine/session_format.h"
#include "efla/engine/stored_text.h"
#include "efla/io/folder_lock.h"

namespace efla::engine {

class SessionFiles;

struct StoreOptions {
  std::size_t memory = kNoBound;        // bytes of states, ids and records, with the ones that reservations promise
  std::filesystem::path swap = {};      // folder for texts beyond `memory`; empty: none
  std::filesystem::path sessions = {};  // folder in which sessions outlive the process (session_files.h); empty: none
  std::int64_t max_disposable = 256;    // texts
};

// Bounds the bytes of texts in memory. A caller that needs room moves the longest unused texts to files, without the
// pages that later used texts in memory have too, or, without a folder for files, drops disposable texts. A page counts
// once, however many texts have it. Several threads may call functions at once; a thread that moves a text to files or
// looks at the pages of all texts does not keep others waiting, unless it looks for a text to drop.
class SessionStore {
 public:
  // Makes the folders if they do not exist, locks them, and removes files that a killed process left in `swap`. Throws
  // Error for a folder that cannot be used, and IoError.
  SessionStore(StoreOptions options, SessionFormat format);
  ~SessionStore();
  // Stores the session of each file in `sessions`. Drops disposable ones without room. Renames each file that is
  // damaged or, beside files of this model, of another one or with keys and values of another type
  // (SessionFiles::set_aside). Throws Error("engine", "sessions", …) where all are such files, because the model or the
  // type is probably not the intended one; NoRoom, IoError.
  void load_files();

  // Room for a text, and its name, until the object dies or the text is stored.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(SessionStore& store, std::string name, std::size_t bytes)
        : store_(&store), name_(std::move(name)), bytes_(bytes) {}
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept {
      std::swap(store_, other.store_);
      std::swap(name_, other.name_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Reservation();

   private:
    friend class SessionStore;
    SessionStore* store_ = nullptr;
    std::string name_;
    std::size_t bytes_ = 0;
  };
  // Reserves room for a text of at most this many bytes. An empty name: of a text that only its holders know. Throws
  // SessionInUse, NoRoom, IoError, Error for a text that is no session's name.
  Reservation reserve(const std::string& name, std::size_t bytes);

  // Stores a text under the name of its reservation, in place of an older one, and calls `then`: with "" or with what
  // went wrong, on another thread if the text gets a file first. Without a name it only counts the text's bytes as long
  // as somebody holds it. With a folder for files reservations together may promise more than the bound: the longest
  // unused texts then move to files. A text stays in memory where writing its file fails, and the next caller that
  // needs room gets the IoError. Throws std::bad_alloc without memory for the entry; an older text of the name then
  // stays.
  void store(Reservation reservation, std::shared_ptr<StoredText> text, bool disposable,
             std::function<void(const std::string& error)> then);
  // Reads a session's bytes and stores it, in place of an older one, or returns a text without a name. Throw what
  // SessionFormat::read and reserve throw.
  void load(const std::string& name, std::string_view bytes);
  std::shared_ptr<const StoredText> read(std::string_view bytes);

  // Throw NoSuchSession; functions that change a session throw SessionInUse too, and std::runtime_error where its file
  // cannot be changed.
  std::shared_ptr<const StoredText> get(const std::string& name);         // counts as a use
  std::shared_ptr<const StoredText> peek(const std::string& name) const;  // is not a use
  void fork(const std::string& name, const std::string& copy);
  void erase(const std::string& name);
  void make_disposable(const std::string& name);

  std::vector<SessionInfo> list() const;
  SessionInfo info(const std::string& name) const;
  std::int64_t size() const;
  const StoredBytes& bytes() const { return *bytes_; }
  const SessionFormat& format() const { return format_; }
  // Returns a state that can be stored, with the pages that stored states share.
  std::shared_ptr<StoredState> stored(const nn::TextState& state) const {
    return std::make_shared<StoredState>(state, pages_);
  }

  // Returns the bytes of a session's file; nothing if there is no such session. Throws IoError.
  std::optional<std::string> file_bytes(const std::string& name) const;
  bool contains(const std::string& name) const;
  SessionFiles* files() const { return files_.get(); }  // null: none

 private:
  struct Entry {
    std::shared_ptr<const StoredText> text;
    std::size_t bytes = 0;  // of the text in memory and files, with what it shares with others
    std::uint64_t used = 0;
    bool disposable = false;
  };
  using Entries = std::map<std::string, Entry>;

  SessionInfo info_of(const std::string& name, const Entry& entry) const;
  Entries::iterator find(const std::string& name);
  Entries::const_iterator find(const std::string& name) const;
  void require_free(const std::string& name) const;
  void use(Entries::iterator entry);
  void hold(const std::shared_ptr<StoredText>& text);
  void put(const std::string& name, const std::shared_ptr<StoredText>& text, std::size_t bytes, bool disposable);
  void add_fork(const std::string& name, const std::string& copy);
  void end(Reservation& reservation);
  void insert(Reservation reservation, std::shared_ptr<StoredText> text, bool disposable);
  void drop(Entries::iterator entry);
  void drop_surplus();
  bool has_room() const;
  void make_room(std::unique_lock<std::mutex>& lock);
  void swap_until(const std::function<bool()>& enough, std::unique_lock<std::mutex>& lock);
  void swap(const std::shared_ptr<const StoredText>& text, std::unique_lock<std::mutex>& lock);
  std::vector<std::shared_ptr<const StoredText>> used_after(std::uint64_t used) const;
  void drop_disposable();
  [[noreturn]] void refuse_room() const;
  void load_file(const std::filesystem::path& file, std::map<std::string, std::string>& names);

  const StoreOptions options_;
  const SessionFormat format_;
  std::optional<io::FolderLock> swap_lock_;
  const std::shared_ptr<StoredBytes> bytes_ = std::make_shared<StoredBytes>();
  const std::shared_ptr<StoredPages> pages_ = std::make_shared<StoredPages>();
  mutable std::mutex mutex_;  // guards the members that follow
  Entries entries_;
  std::map<std::uint64_t, std::weak_ptr<const StoredText>> in_memory_;  // by use; without texts that moved to files
  std::map<std::uint64_t, std::string> disposable_;                     // names by use
  std::unordered_set<std::string> reserved_;                            // names
  std::size_t promised_ = 0;                                            // bytes of reservations
  std::uint64_t now_ = 0;
  std::unique_ptr<SessionFiles> files_;  // last: its destructor writes sessions
};

}  // namespace efla::engine
