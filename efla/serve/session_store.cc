#include "efla/serve/session_store.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <utility>

namespace efla::serve {
namespace {

void check_name(const std::string& name) {
  constexpr std::size_t kLongest = 128;
  const bool known = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
  if (known && !name.empty() && name.size() <= kLongest) return;
  throw Error("engine", "session", "'" + name.substr(0, kLongest) + "'",
              "a name of 1 to 128 letters, digits and characters of \"._-\"");
}

[[noreturn]] void refuse(const std::filesystem::path& file) {
  throw IoError(IoError::Kind::system, file.string(), -1, std::strerror(errno));
}

std::filesystem::path new_file(const std::filesystem::path& folder) {
  static std::atomic<std::uint64_t> count{0};
  return folder / ("state-" + std::to_string(getpid()) + "-" + std::to_string(count++));
}

// Calls f with every state of a text.
template <class F>
void for_each_state(const StoredText& text, F&& f) {
  if (text.state) f(text.state);
  if (text.before && text.before->state) f(text.before->state);
}

}  // namespace

StoredState::~StoredState() {
  std::error_code none;
  if (!file_.empty()) std::filesystem::remove(file_, none);
}

bool StoredState::in_memory() const {
  const std::lock_guard lock(mutex_);
  return file_.empty();
}

void StoredState::copy_to(std::span<float> to) const {
  const std::lock_guard lock(mutex_);
  if (file_.empty()) {
    std::copy(values_.begin(), values_.end(), to.begin());
    return;
  }
  std::ifstream in(file_, std::ios::binary);
  if (!in.read(reinterpret_cast<char*>(to.data()), static_cast<std::streamsize>(bytes()))) refuse(file_);
}

void StoredState::swap_out(const std::filesystem::path& folder) {
  const std::lock_guard lock(mutex_);
  if (!file_.empty()) return;
  const auto file = new_file(folder);
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(values_.data()), static_cast<std::streamsize>(bytes()));
  out.close();
  if (!out) {
    std::error_code none;
    std::filesystem::remove(file, none);
    refuse(file);
  }
  file_ = file;
  std::vector<float>().swap(values_);
}

SessionStore::SessionStore(std::size_t memory, std::filesystem::path swap_folder)
    : memory_(memory), swap_folder_(std::move(swap_folder)) {
  if (!swap_folder_.empty()) std::filesystem::create_directories(swap_folder_);
}

const SessionStore::Entry& SessionStore::peek_locked(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw NoSuchSession("engine", "session", "'" + name + "'", "the name of a session");
  return found->second;
}

SessionStore::Entry& SessionStore::find(const std::string& name) {
  peek_locked(name);  // throws
  Entry& entry = entries_[name];
  entry.used = ++now_;
  return entry;
}

void SessionStore::require_free(const std::string& name) const {
  if (reserved_.contains(name)) {
    throw SessionInUse("engine", "session", "'" + name + "', which a request advances",
                       "a session that no request advances");
  }
}

void SessionStore::require_room(std::size_t bytes) const {
  if (bytes == 0 || !swap_folder_.empty()) return;
  std::size_t promised = 0;
  for (const auto& [name, reserved] : reserved_) promised += reserved;
  if (bytes_locked().first + promised + bytes <= memory_) return;
  throw NoRoom("engine", "session_memory",
               "no room for " + std::to_string(bytes) + " bytes more in " + std::to_string(memory_),
               "room, or a swap_folder for sessions that are not in use");
}

std::shared_ptr<const StoredText> SessionStore::get(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return find(name).text;
}

std::shared_ptr<const StoredText> SessionStore::peek(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return peek_locked(name).text;
}

void SessionStore::put(const std::string& name, std::shared_ptr<const StoredText> text) {
  check_name(name);
  const std::lock_guard lock(mutex_);
  require_free(name);
  require_room(text->state ? text->state->bytes() : 0);
  entries_[name] = {std::move(text), ++now_};
  make_room();
}

void SessionStore::fork(const std::string& name, const std::string& copy) {
  check_name(copy);
  const std::lock_guard lock(mutex_);
  const auto text = find(name).text;
  require_free(copy);
  if (entries_.contains(copy)) throw Error("engine", "copy", "'" + copy + "', which exists", "a new name");
  entries_[copy] = {text, ++now_};
}

void SessionStore::erase(const std::string& name) {
  const std::lock_guard lock(mutex_);
  find(name);
  require_free(name);
  entries_.erase(name);
}

void SessionStore::reserve(const std::string& name, std::size_t bytes) {
  check_name(name);
  const std::lock_guard lock(mutex_);
  require_free(name);
  require_room(bytes);
  reserved_.emplace(name, bytes);
}

void SessionStore::release(const std::string& name, std::shared_ptr<const StoredText> text) {
  const std::lock_guard lock(mutex_);
  reserved_.erase(name);
  if (!text) return;
  entries_[name] = {std::move(text), ++now_};
  make_room();
}

// Swaps the states of the texts that were used the longest ago.
void SessionStore::make_room() {
  if (swap_folder_.empty()) return;
  std::vector<const Entry*> oldest;
  for (const auto& [name, entry] : entries_) oldest.push_back(&entry);
  std::sort(oldest.begin(), oldest.end(), [](const Entry* a, const Entry* b) { return a->used < b->used; });
  for (auto it = oldest.begin(); it != oldest.end() && bytes_locked().first > memory_; ++it) {
    for_each_state(*(*it)->text, [&](const auto& state) { state->swap_out(swap_folder_); });
  }
}

std::pair<std::size_t, std::size_t> SessionStore::bytes_locked() const {
  std::set<const StoredState*> counted;
  std::size_t memory = 0, files = 0;
  for (const auto& [name, entry] : entries_) {
    for_each_state(*entry.text, [&](const auto& state) {
      if (counted.insert(state.get()).second) (state->in_memory() ? memory : files) += state->bytes();
    });
  }
  return {memory, files};
}

std::pair<std::size_t, std::size_t> SessionStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_locked();
}

SessionInfo SessionStore::info_of(const std::string& name, const Entry& entry) const {
  SessionInfo info{name, entry.text->tokens(), entry.text->rewindable()};
  for_each_state(*entry.text, [&](const auto& state) {
    info.bytes += state->bytes();
    info.in_memory = info.in_memory && state->in_memory();
  });
  info.in_use = reserved_.contains(name);
  return info;
}

std::vector<SessionInfo> SessionStore::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<SessionInfo> all;
  for (const auto& [name, entry] : entries_) all.push_back(info_of(name, entry));
  return all;
}

SessionInfo SessionStore::info(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return info_of(name, peek_locked(name));
}

}  // namespace efla::serve
