// An engine that also keeps its sessions in files of a folder, so that they outlive the process even if it is killed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "efla/engine/engine.h"
#include "efla/io/folder_lock.h"

namespace efla::engine {

// Writes a session to NAME.safetensors before the call that stores it returns, or before the reply that stores it ends.
// Where the file cannot be written, the call throws std::runtime_error, or the reply ends with FinishReason::error; the
// session stays stored in memory, and each later save of a session tries to write it too. A session whose name begins
// with '_' gets no file, because it is an intermediate result of the API; one whose name begins with '.' or '-' gets
// none, because no client of the API can give the name. A session that came from a file
// cannot be rewound.
class DurableEngine final : public Engine {
 public:
  // Makes the folder if it does not exist, locks it, and stores the session of each file NAME.safetensors. Renames each
  // file that is damaged or of another model (set_aside). Other files, folders, and links to nothing stay as they are.
  // Throws Error("engine", "sessions", …) for a folder that cannot be locked and for one whose sessions are all of
  // other models, NoRoom, IoError.
  DurableEngine(std::unique_ptr<Engine> engine, std::filesystem::path sessions);
  ~DurableEngine() override;

  EngineInfo info() const override { return engine_->info(); }
  using Engine::submit;
  RequestId submit(Request request, std::vector<std::shared_ptr<Listener>> listeners) override;
  void cancel(RequestId id) override { engine_->cancel(id); }
  void interrupt(RequestId id) override { engine_->interrupt(id); }
  std::vector<SessionInfo> sessions() const override { return engine_->sessions(); }
  SessionInfo session(const std::string& name) const override { return engine_->session(name); }
  void fork(const std::string& name, const std::string& copy) override;
  std::string save(const std::string& name) const override { return engine_->save(name); }
  void load(const std::string& name, std::string_view bytes) override;
  void erase(const std::string& name) override;
  void make_disposable(const std::string& name) override;
  Statistics statistics() const override {
    Statistics now = engine_->statistics();
    now.set_aside = set_aside_.size();
    return now;
  }

  // Returns a sentence about each file that the start has renamed, because it is damaged or of another model.
  const std::vector<std::string>& set_aside() const { return set_aside_; }

  // Writes the sessions whose files could not be written before, for the end of the program. Throws std::runtime_error
  // where a file still cannot be written.
  void keep_unwritten();

 private:
  class KeepingListener;

  std::filesystem::path file_of(const std::string& name) const;
  void load_all();
  void load_file(const std::filesystem::path& file, std::map<std::string, std::string>& names);
  void set_aside(const std::filesystem::path& file, const std::string& reason);
  void keep(const std::string& name);
  void write(const std::string& name);
  std::vector<std::string> write_again();
  std::set<std::string> remove_dropped();
  void keep_later(const std::string& name, std::function<void(const std::string& error)> then);
  void run();

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

  std::thread thread_;              // writes the sessions of replies, because listeners may not wait
  std::unique_ptr<Engine> engine_;  // last: its destructor ends replies, which need the others
};

}  // namespace efla::engine
