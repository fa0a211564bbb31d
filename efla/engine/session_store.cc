#include "efla/engine/session_store.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "efla/base/error.h"

namespace efla::engine {
namespace {

void check_name(const std::string& name) {
  if (is_session_name(name)) return;
  throw Error("engine", "session", "'" + name.substr(0, 128) + "'",
              "a name of 1 to 128 letters, digits and characters of \"._-\"");
}

// Adds up what dropping texts, one after the other, sets free: the bytes that no other text and no running request
// holds.
class FreedBytes {
 public:
  std::size_t drop(const std::shared_ptr<const StoredText>& text) {
    if (text.use_count() > 1 || (text->state && text->state.use_count() > 1)) return 0;
    std::size_t bytes = text->record_bytes();
    if (!text->state) return bytes;
    bytes += text->state->constant_bytes();
    for (const auto& page : text->state->pages()) {
      if (++dropped_[page.get()] == page.use_count()) bytes += page->bytes();
    }
    return bytes;
  }

 private:
  std::unordered_map<const StoredPage*, long> dropped_;  // how many of the texts that have a page
};

std::size_t bytes_of(const SessionRecord& record) {
  return record.pending.size() * sizeof(record.pending[0]) + record.last_ids.size() * sizeof(record.last_ids[0]) +
         record.seen.size() + record.held.size();
}

// Returns the bytes of a text in memory and files, with what it shares with others.
std::size_t bytes_of(const StoredText& text) {
  std::size_t bytes = text.record_bytes();
  std::unordered_set<const void*> seen;
  text.for_each_part([&](const auto& part) { bytes += seen.insert(&part).second ? part.bytes() : 0; });
  return bytes;
}

// Return whether every part of a text is in memory, or none that may move to a file.
bool is_in_memory(const StoredText& text) {
  bool all = true;
  text.for_each_part([&](const auto& part) { all = all && part.in_memory(); });
  return all;
}
bool is_in_file(const StoredText& text) {
  bool all = true;
  text.for_each_part([&](const auto& part) { all = all && (part.size() == 0 || !part.in_memory()); });
  return all;
}

}  // namespace

std::size_t StoredText::record_bytes() const {
  return sizeof(StoredText) + bytes_of(record) + (before ? sizeof(StoredText) + bytes_of(before->record) : 0);
}

SessionStore::SessionStore(std::size_t memory, std::filesystem::path swap, std::int64_t max_disposable)
    : memory_(memory), swap_folder_(std::move(swap)), max_disposable_(max_disposable) {
  if (swap_folder_.empty()) return;
  swap_lock_.emplace(io::lock_folder(swap_folder_, "engine", "swap"));
  for (const auto& file : std::filesystem::directory_iterator(swap_folder_)) {
    std::error_code none;
    if (file.path().extension() == kSwapEnd) std::filesystem::remove(file, none);
  }
}

SessionStore::Entries::const_iterator SessionStore::find(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw NoSuchSession("engine", "session", "'" + name + "'", "the name of a session");
  return found;
}

SessionStore::Entries::iterator SessionStore::find(const std::string& name) {
  static_cast<const SessionStore&>(*this).find(name);  // throws
  return entries_.find(name);
}

void SessionStore::require_free(const std::string& name) const {
  if (reserved_.contains(name)) {
    throw SessionInUse("engine", "session", "'" + name + "', which a request advances",
                       "a session that no request advances");
  }
}

void SessionStore::use(Entries::iterator entry) {
  auto& used = entry->second.used;
  for (auto* order : {&in_memory_, &disposable_}) {
    auto node = order->extract(used);
    if (!node) continue;
    node.key() = now_ + 1;
    order->insert(std::move(node));
  }
  used = ++now_;
}

void SessionStore::drop(Entries::iterator entry) {
  in_memory_.erase(entry->second.used);
  disposable_.erase(entry->second.used);
  entries_.erase(entry);
}

void SessionStore::drop_surplus() {
  while (std::cmp_greater(disposable_.size(), max_disposable_)) drop(find(disposable_.begin()->second));
}

void SessionStore::store(const std::string& name, std::shared_ptr<StoredText> text, bool disposable) {
  text->for_each_part([&](auto& part) { part.count(bytes_); });
  text->counted.count(bytes_, text->record_bytes());
  const auto used = ++now_;
  Entries entry;
  entry[name] = {std::move(text), used, disposable};
  std::map<std::uint64_t, std::string> in_memory{{used, name}}, disposables;
  if (disposable) disposables[used] = name;
  // Nothing throws from here on, so that an older text is lost only for a new one.
  if (const auto old = entries_.find(name); old != entries_.end()) drop(old);
  entries_.merge(entry);
  in_memory_.merge(in_memory);
  disposable_.merge(disposables);
  drop_surplus();
}

std::shared_ptr<const StoredText> SessionStore::get(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = find(name);
  use(found);
  return found->second.text;
}

std::shared_ptr<const StoredText> SessionStore::peek(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return find(name)->second.text;
}

void SessionStore::put(const std::string& name, std::shared_ptr<StoredText> text) {
  reserve(name, bytes_of(*text));
  release(name, std::move(text), /*disposable=*/false);
}

void SessionStore::fork(const std::string& name, const std::string& copy) {
  check_name(copy);
  const std::lock_guard lock(mutex_);
  const auto found = find(name);
  use(found);
  require_free(copy);
  if (entries_.contains(copy)) throw Error("engine", "copy", "'" + copy + "', which exists", "a new name");
  entries_[copy] = {found->second.text, ++now_};
  in_memory_[now_] = copy;
}

void SessionStore::erase(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = find(name);
  require_free(name);
  drop(found);
}

void SessionStore::make_disposable(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = find(name);
  require_free(name);
  found->second.disposable = true;
  disposable_[found->second.used] = name;
  drop_surplus();
}

void SessionStore::reserve(const std::string& name, std::size_t bytes) {
  check_name(name);
  std::unique_lock lock(mutex_);
  require_free(name);
  reserved_.emplace(name, bytes);
  promised_ += bytes;
  if (bytes == 0) return;
  try {
    make_room(lock);
  } catch (...) {
    reserved_.erase(name);
    promised_ -= bytes;
    throw;
  }
}

void SessionStore::release(const std::string& name, std::shared_ptr<StoredText> text, bool disposable) {
  std::unique_lock lock(mutex_);
  const auto reserved = reserved_.find(name);
  promised_ -= reserved->second;
  reserved_.erase(reserved);
  if (!text) return;
  store(name, std::move(text), disposable);
  if (swap_folder_.empty()) return;
  try {
    swap_until([this] { return bytes_->staying() <= memory_; }, lock);
  } catch (const std::exception&) {  // the next caller that needs room gets the error
  }
}

bool SessionStore::has_room() const { return bytes_->staying() + promised_ <= memory_; }

void SessionStore::make_room(std::unique_lock<std::mutex>& lock) {
  if (swap_folder_.empty()) return drop_disposable();
  swap_until([this] { return has_room(); }, lock);
  if (bytes_->staying() > memory_) refuse_room();  // the records that never move to files are too large
}

void SessionStore::refuse_room() const {
  throw NoRoom("engine", "session_memory",
               std::to_string(bytes_->memory + promised_) + " bytes with what running requests will store",
               "at most " + std::to_string(memory_) +
                   (swap_folder_.empty() ? ", or in swap a folder for sessions that are not in use" : ""));
}

// Moves texts to files, the longest unused first, until there is enough room or no text is left.
void SessionStore::swap_until(const std::function<bool()>& enough, std::unique_lock<std::mutex>& lock) {
  std::uint64_t last = 0;
  while (!enough()) {
    const auto next = in_memory_.upper_bound(last);
    if (next == in_memory_.end()) return;
    last = next->first;
    swap(std::string(next->second), last, lock);
  }
}

// Moves a text that was used last at this time to files, without the pages of texts that were used later.
void SessionStore::swap(const std::string& name, std::uint64_t used, std::unique_lock<std::mutex>& lock) {
  const auto text = find(name)->second.text;
  const auto kept = pages_used_after(used);
  std::unordered_set<const void*> claimed;
  text->for_each_part([&](auto& part) {
    if (!kept.contains(&part) && claimed.insert(&part).second && !part.claim()) claimed.erase(&part);
  });
  lock.unlock();
  std::exception_ptr failed;
  text->for_each_part([&](auto& part) {
    if (!claimed.contains(&part)) return;
    try {
      if (!failed) return part.swap_out(swap_folder_);
    } catch (...) {
      failed = std::current_exception();
    }
    part.unclaim();
  });
  lock.lock();
  if (failed) std::rethrow_exception(failed);
  if (!is_in_file(*text)) return;
  const auto found = entries_.find(name);
  if (found != entries_.end() && found->second.text == text) in_memory_.erase(found->second.used);
}

std::unordered_set<const void*> SessionStore::pages_used_after(std::uint64_t used) const {
  std::unordered_set<const void*> pages;
  for (auto entry = in_memory_.upper_bound(used); entry != in_memory_.end(); ++entry) {
    const auto& text = *find(entry->second)->second.text;
    if (!text.state) continue;
    for (const auto& page : text.state->pages()) pages.insert(page.get());
  }
  return pages;
}

// Drops the least recently used disposable texts. Drops none if that is not enough.
void SessionStore::drop_disposable() {
  if (has_room()) return;
  std::size_t most = 0;
  FreedBytes freed;
  for (const auto& [used, name] : disposable_) most += freed.drop(find(name)->second.text);
  if (bytes_->memory + promised_ > memory_ + most) refuse_room();
  for (auto it = disposable_.begin(); it != disposable_.end() && !has_room();) {
    const auto entry = find((it++)->second);
    if (FreedBytes().drop(entry->second.text) > 0) drop(entry);
  }
}

SessionInfo SessionStore::info_of(const std::string& name, const Entry& entry) const {
  SessionInfo info{name, entry.text->tokens(), entry.text->rewindable()};
  const auto& record = entry.text->record;
  info.pending = static_cast<std::int64_t>(record.pending.size());
  info.seed = record.counters[0];
  info.draws = record.counters[1];
  if (!record.last_ids.empty()) info.last_id = record.last_ids.back();
  info.bytes = bytes_of(*entry.text);
  info.in_memory = is_in_memory(*entry.text);
  info.in_use = reserved_.contains(name);
  info.disposable = entry.disposable;
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
  return info_of(name, find(name)->second);
}

std::int64_t SessionStore::size() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(entries_.size());
}

}  // namespace efla::engine
