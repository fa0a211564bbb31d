#include "efla/engine/session_files.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "efla/engine/engine.h"
#include "efla/engine/session_store.h"
#include "efla/io/file.h"

namespace efla::engine {
namespace {

constexpr const char* kEnd = ".safetensors";
constexpr const char* kSetAside = ".set-aside";  // appended to the names of files that cannot be loaded

}  // namespace

SessionFiles::SessionFiles(const SessionStore& store, std::filesystem::path folder)
    : store_(store), folder_(std::move(folder)), lock_(io::lock_folder(folder_, "engine", "sessions")) {
  io::remove_stale_temporaries(folder_);
  thread_ = std::thread([this] { run(); });
}

SessionFiles::~SessionFiles() {
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

bool SessionFiles::has_file(const std::string& name) {
  return is_session_name(name) && std::string_view("._-").find(name.front()) == std::string_view::npos;
}

std::filesystem::path SessionFiles::file_of(const std::string& name) const { return folder_ / (name + kEnd); }

std::vector<std::filesystem::path> SessionFiles::found() const {
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::filesystem::path& file = entry.path();
    std::error_code none;  // for a link to nothing
    if (file.extension() != kEnd || !has_file(file.stem().string()) || !entry.is_regular_file(none)) continue;
    files.emplace_back(entry.last_write_time(), file);
  }
  std::sort(files.begin(), files.end());
  std::vector<std::filesystem::path> paths;
  for (auto& [written, file] : files) paths.push_back(std::move(file));
  return paths;
}

void SessionFiles::set_aside(const std::filesystem::path& file, const std::string& reason) {
  auto aside = file;
  aside += kSetAside;
  for (int more = 2; std::filesystem::exists(aside); ++more) {
    aside = file;
    aside += kSetAside + std::to_string(more);
  }
  std::filesystem::rename(file, aside);
  set_aside_.push_back(file.string() + " cannot be loaded (" + reason + ") and is now " + aside.filename().string());
}

void SessionFiles::keep(const std::string& name) {
  const std::lock_guard lock(files_mutex_);
  write(name);
  write_again();
  remove_files();
}

// Writes the file of a session that still exists. files_mutex_ must be held.
void SessionFiles::write(const std::string& name) {
  try {
    if (const auto bytes = store_.file_bytes(name)) {
      files_.insert(name);  // first, because a write that fails may have put the file in place all the same
      io::write_file_atomically(file_of(name), *bytes);
    }
  } catch (const std::exception& error) {
    unwritten_.insert(name);
    throw std::runtime_error("session: " + name + " is stored, but not in a file (" + error.what() + ")");
  }
  unwritten_.erase(name);
}

// Writes the sessions whose files could not be written. Returns the errors. files_mutex_ must be held.
std::vector<std::string> SessionFiles::write_again() {
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

void SessionFiles::keep_unwritten() {
  const std::lock_guard lock(files_mutex_);
  const auto errors = write_again();
  if (errors.empty()) return;
  const auto others = errors.size() == 1 ? "" : ", like " + std::to_string(errors.size() - 1) + " other sessions";
  throw std::runtime_error(errors.front() + others);
}

// Removes the files of sessions that no longer exist. Returns the sessions whose files cannot be removed. files_mutex_
// must be held.
std::set<std::string> SessionFiles::remove_files() {
  std::set<std::string> failed;
  std::erase_if(files_, [&](const std::string& name) {
    if (store_.contains(name)) return false;
    std::error_code error;
    std::filesystem::remove(file_of(name), error);
    if (error) failed.insert(name);
    return !error;
  });
  return failed;
}

void SessionFiles::remove_dropped(const std::string& erased) {
  const std::lock_guard lock(files_mutex_);
  if (!remove_files().contains(erased)) return;
  throw std::runtime_error("session: " + erased + " is erased, but its file is not");
}

void SessionFiles::keep_later(const std::string& name, std::function<void(const std::string& error)> then) {
  auto task = [this, name, then = std::move(then)] {
    std::string error;
    try {
      keep(name);
    } catch (const std::exception& failed) {
      error = failed.what();
    }
    then(error);
  };
  const std::lock_guard lock(queue_mutex_);
  queue_.push_back(std::move(task));
  changed_.notify_one();
}

void SessionFiles::run() {
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

}  // namespace efla::engine
