#include "efla/engine/durable_engine.h"

#include <algorithm>
#include <exception>
#include <map>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "efla/io/safetensors/safetensors.h"
#include "efla/io/sha256.h"

namespace efla::engine {
namespace {

constexpr const char* kEnd = ".safetensors";
constexpr const char* kSetAside = ".set-aside";  // appended to the names of files that cannot be loaded

constexpr const char* kDisposable = "disposable";  // key in the metadata of files of disposable sessions

// Returns whether a session has a file: clients cannot name a session whose name begins with ".", "_" or "-".
bool is_kept(const std::string& name) {
  return is_session_name(name) && std::string_view("._-").find(name.front()) == std::string_view::npos;
}

}  // namespace

// Holds a reply's end back until its session is in a file.
class DurableEngine::KeepingListener : public Listener {
 public:
  KeepingListener(DurableEngine& engine, std::string name, std::shared_ptr<Listener> listener)
      : engine_(engine), name_(std::move(name)), listener_(std::move(listener)) {}

  void prompt(std::span<const PromptToken> tokens) override { listener_->prompt(tokens); }
  void token(const Token& token) override { listener_->token(token); }
  void finish(const Finish& finish) override {
    if (!is_whole(finish.reason)) return listener_->finish(finish);
    engine_.keep_later(name_, [listener = listener_, end = finish](const std::string& error) mutable {
      if (!error.empty()) {
        end.reason = FinishReason::error;
        end.error = error;
      }
      try {
        listener->finish(end);
      } catch (const std::exception&) {  // the reply has ended anyway
      }
    });
  }

 private:
  DurableEngine& engine_;
  std::string name_;
  std::shared_ptr<Listener> listener_;
};

DurableEngine::DurableEngine(std::unique_ptr<Engine> engine, std::filesystem::path sessions)
    : folder_(std::move(sessions)), lock_(io::lock_folder(folder_, "engine", "sessions")), engine_(std::move(engine)) {
  io::remove_stale_temporaries(folder_);
  load_all();
  thread_ = std::thread([this] { run(); });
}

DurableEngine::~DurableEngine() {
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

std::filesystem::path DurableEngine::file_of(const std::string& name) const { return folder_ / (name + kEnd); }

// Loads the session of each file that has a session's name. Disposable sessions without room are dropped. Renames files
// of other models only beside a file of this model, because otherwise the model is probably not the intended one.
void DurableEngine::load_all() {
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::filesystem::path& file = entry.path();
    std::error_code none;  // for a link to nothing
    if (file.extension() != kEnd || !is_kept(file.stem().string()) || !entry.is_regular_file(none)) continue;
    files.emplace_back(entry.last_write_time(), file);
  }
  std::sort(files.begin(), files.end());     // the oldest file first: its session counts as the longest unused
  std::map<std::string, std::string> names;  // name of the first session by the checksum of its file
  std::vector<std::pair<std::filesystem::path, std::string>> others;  // files of other models, and whose they are
  for (const auto& [written, file] : files) {
    try {
      load_file(file, names);
    } catch (const NoRoom&) {
      throw;
    } catch (const IoError& error) {
      if (error.kind() != IoError::Kind::content && error.path() != file) throw;  // of another file
      set_aside(file, error.what());
    } catch (const Error& error) {
      others.emplace_back(file, error.got());
    }
  }
  if (!others.empty() && files_.empty()) {
    const auto& [file, got] = others.front();
    throw Error("engine", "sessions", file.string() + " (" + got + ")", "a session of this model");
  }
  for (const auto& [file, got] : others) set_aside(file, got);
  remove_dropped();
}

// Loads the session of a file. Session files of the same bytes are forks and share the memory again.
void DurableEngine::load_file(const std::filesystem::path& file, std::map<std::string, std::string>& names) {
  const std::string name = file.stem().string();
  const auto bytes = io::read_file(file);
  const bool disposable = io::parse_safetensors(bytes, file).metadata.contains(kDisposable);
  try {
    const auto sum = io::sha256(bytes);
    if (const auto first = names.find(sum); first != names.end() && !disposable) {
      engine_->fork(first->second, name);
    } else {
      engine_->load(name, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      names.emplace(sum, name);
    }
    if (disposable) engine_->make_disposable(name);
  } catch (const NoRoom&) {
    if (!disposable) throw;
  }
  files_.insert(name);
}

// Renames a file whose session cannot be loaded, so that the start serves the other sessions.
void DurableEngine::set_aside(const std::filesystem::path& file, const std::string& reason) {
  auto aside = file;
  aside += kSetAside;
  for (int more = 2; std::filesystem::exists(aside); ++more) {
    aside = file;
    aside += kSetAside + std::to_string(more);
  }
  std::filesystem::rename(file, aside);
  set_aside_.push_back(file.string() + " cannot be loaded (" + reason + ") and is now " + aside.filename().string());
}

// Makes the file of a session agree with the engine, and tries sessions again whose files could not be written.
void DurableEngine::keep(const std::string& name) {
  if (!is_kept(name)) return;
  const std::lock_guard lock(files_mutex_);
  write(name);
  write_again();
  remove_dropped();
}

// Writes the file of a session that still exists. files_mutex_ must be held.
void DurableEngine::write(const std::string& name) {
  try {
    std::string bytes = engine_->save(name);
    if (engine_->session(name).disposable) {
      auto [tensors, metadata] = io::parse_safetensors(io::as_bytes(bytes), name);
      metadata[kDisposable] = "true";
      bytes = io::safetensors_bytes(tensors, metadata);
    }
    files_.insert(name);  // first, because a write that fails may have put the file in place all the same
    io::write_file_atomically(file_of(name), bytes);
  } catch (const NoSuchSession&) {  // dropped or erased meanwhile
  } catch (const std::exception& error) {
    unwritten_.insert(name);
    throw std::runtime_error("session: " + name + " is stored, but not in a file (" + error.what() + ")");
  }
  unwritten_.erase(name);
}

// Writes the sessions whose files could not be written. Returns the errors. files_mutex_ must be held.
std::vector<std::string> DurableEngine::write_again() {
  std::vector<std::string> errors;
  for (const auto& name : std::set(unwritten_)) {
    try {
      write(name);
    } catch (const std::runtime_error& error) {
      errors.emplace_back(error.what());
    }
  }
  return errors;
}

void DurableEngine::keep_unwritten() {
  const std::lock_guard lock(files_mutex_);
  const auto errors = write_again();
  if (errors.empty()) return;
  const auto others = errors.size() == 1 ? "" : ", like " + std::to_string(errors.size() - 1) + " other sessions";
  throw std::runtime_error(errors.front() + others);
}

// Removes the files of sessions that no longer exist. Returns the sessions whose files cannot be removed; the next call
// tries again.
std::set<std::string> DurableEngine::remove_dropped() {
  std::set<std::string> stored, failed;
  for (const auto& session : engine_->sessions()) stored.insert(session.name);
  std::erase_if(files_, [&](const std::string& name) {
    if (stored.contains(name)) return false;
    std::error_code error;
    std::filesystem::remove(file_of(name), error);
    if (error) failed.insert(name);
    return !error;
  });
  return failed;
}

// Keeps a session and then calls `then`: on the writing thread, or on this thread once the writing thread is to stop.
void DurableEngine::keep_later(const std::string& name, std::function<void(const std::string& error)> then) {
  auto task = [this, name, then = std::move(then)] {
    std::string error;
    try {
      keep(name);
    } catch (const std::exception& failed) {
      error = failed.what();
    }
    then(error);
  };
  {
    const std::lock_guard lock(queue_mutex_);
    if (!stopping_) {
      queue_.push_back(std::move(task));
      changed_.notify_one();
      return;
    }
  }
  task();
}

void DurableEngine::run() {
  std::unique_lock lock(queue_mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (const std::exception&) {  // no memory to report it: the reply's listener gets no end
    }
    lock.lock();
  }
}

RequestId DurableEngine::submit(Request request, std::vector<std::shared_ptr<Listener>> listeners) {
  if (is_kept(request.save_as)) {
    for (auto& listener : listeners) {
      listener = std::make_shared<KeepingListener>(*this, request.save_as, std::move(listener));
    }
  }
  return engine_->submit(std::move(request), std::move(listeners));
}

void DurableEngine::fork(const std::string& name, const std::string& copy) {
  engine_->fork(name, copy);
  keep(copy);
}

void DurableEngine::load(const std::string& name, std::string_view bytes) {
  engine_->load(name, bytes);
  keep(name);
}

void DurableEngine::make_disposable(const std::string& name) {
  engine_->make_disposable(name);
  keep(name);
}

void DurableEngine::erase(const std::string& name) {
  engine_->erase(name);
  const std::lock_guard lock(files_mutex_);
  if (remove_dropped().contains(name)) throw std::runtime_error("session: " + name + " is erased, but its file is not");
}

}  // namespace efla::engine
