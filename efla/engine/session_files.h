// The files of sessions that outlive the process, even if it is killed.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "efla/io/folder_lock.h"

namespace efla::engine {

class SessionStore;

// Keeps a session as NAME.safetensors in a folder. Where the file cannot be written, the session stays stored in
// memory, and each later save of a session tries to write it too. A session whose name no client of the API can give,
// because it begins with '.', '_' or '-', gets no file. A session that came from a file cannot be rewound. Several
// threads may call functions at once.
class SessionFiles {
 public:
  // Makes the folder if it does not exist, and locks it. Throws Error("engine", "sessions", …) for a folder that cannot
  // be locked.
  SessionFiles(const SessionStore& store, std::filesystem::path folder);
  ~SessionFiles();  // after the calls that wait in keep_later

  // Returns whether a session has a file.
  static bool has_file(const std::string& name);
  // Returns the files of sessions, the oldest first. Other files, folders, and links to nothing are not among them.
  std::vector<std::filesystem::path> found() const;
  // Says that a session was read from its file.
  void add(const std::string& name) { files_.insert(name); }
  // Renames a file whose session cannot be loaded, so that the start serves the other sessions.
  void set_aside(const std::filesystem::path& file, const std::string& reason);
  // Returns a sentence about each renamed file.
  const std::vector<std::string>& all_set_aside() const { return set_aside_; }

  // Makes the file of a session agree with the store, tries sessions again whose files could not be written, and
  // removes the files of sessions that no longer exist. Throws std::runtime_error where the session's file cannot be
  // written.
  void keep(const std::string& name);
  // Does the same on another thread, because engines may not wait, and then calls `then` with "" or the error.
  void keep_later(const std::string& name, std::function<void(const std::string& error)> then);
  // Removes the files of sessions that no longer exist; the next call tries again where it fails. Throws
  // std::runtime_error if this is the file of `erased`.
  void remove_dropped(const std::string& erased = {});
  // Writes the sessions whose files could not be written before, for the end of the program. Throws std::runtime_error
  // where a file still cannot be written.
  void keep_unwritten();

 private:
  std::filesystem::path file_of(const std::string& name) const;
  void write(const std::string& name);
  std::vector<std::string> write_again();
  std::set<std::string> remove_files();
  void run();

  const SessionStore& store_;
  const std::filesystem::path folder_;
  const io::FolderLock lock_;
  std::vector<std::string> set_aside_;

  std::mutex files_mutex_;           // guards the folder's files and the members that follow
  std::set<std::string> files_;      // names of sessions that were read from files or written to them
  std::set<std::string> unwritten_;  // names of sessions whose files could not be written

  std::mutex queue_mutex_;  // guards the members that follow
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;

  std::thread thread_;  // last, because it uses all others
};

}  // namespace efla::engine
