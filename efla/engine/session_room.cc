// Room in the store of sessions: which texts are dropped, and which move to files.
#include <algorithm>
#include <exception>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/engine/session_store.h"

namespace efla::engine {
namespace {

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

std::unordered_set<const void*> pages_of(std::vector<std::shared_ptr<const StoredText>> texts) {
  std::unordered_set<const void*> pages;
  for (const auto& text : texts) {
    if (!text->state) continue;
    for (const auto& page : text->state->pages()) pages.insert(page.get());
  }
  return pages;
}

// Returns whether every part of a text that may move to a file is in one.
bool is_in_file(const StoredText& text) {
  bool all = true;
  text.for_each_part([&](const auto& part) { all = all && (part.size() == 0 || !part.in_memory()); });
  return all;
}

}  // namespace

bool SessionStore::has_room() const { return bytes_->staying() + promised_ <= options_.memory; }

void SessionStore::make_room(std::unique_lock<std::mutex>& lock) {
  if (options_.swap.empty()) return drop_disposable();
  swap_until([this] { return has_room(); }, lock);
  if (bytes_->staying() > options_.memory) refuse_room();  // the records that never move to files are too large
}

void SessionStore::refuse_room() const {
  throw NoRoom("engine", "session_memory",
               std::to_string(bytes_->memory + promised_) + " bytes with what running requests will store",
               "at most " + std::to_string(options_.memory) +
                   (options_.swap.empty() ? ", or in swap a folder for sessions that are not in use" : ""));
}

// Moves texts to files, the longest unused first, until there is enough room or no text is left.
void SessionStore::swap_until(const std::function<bool()>& enough, std::unique_lock<std::mutex>& lock) {
  std::uint64_t last = 0;
  while (!enough()) {
    const auto next = in_memory_.upper_bound(last);
    if (next == in_memory_.end()) return;
    last = next->first;
    if (const auto text = next->second.lock()) {
      swap(text, lock);
    } else {
      in_memory_.erase(next);
    }
  }
}

// Moves a text to files, without the pages of texts that were used later.
void SessionStore::swap(const std::shared_ptr<const StoredText>& text, std::unique_lock<std::mutex>& lock) {
  auto later = used_after(text->used);
  lock.unlock();
  const auto kept = pages_of(std::move(later));
  std::unordered_set<const void*> claimed;
  lock.lock();  // so that callers that have waited know how much is moving
  text->for_each_part([&](auto& part) {
    if (!kept.contains(&part) && claimed.insert(&part).second && !part.claim()) claimed.erase(&part);
  });
  lock.unlock();
  std::exception_ptr failed;
  text->for_each_part([&](auto& part) {
    if (!claimed.erase(&part)) return;
    try {
      if (!failed) return part.swap_out(options_.swap);
    } catch (...) {
      failed = std::current_exception();
    }
    part.unclaim();
  });
  lock.lock();
  if (failed) std::rethrow_exception(failed);
  if (is_in_file(*text)) in_memory_.erase(text->used);
}

// Returns the texts in memory that were used later.
std::vector<std::shared_ptr<const StoredText>> SessionStore::used_after(std::uint64_t used) const {
  std::vector<std::shared_ptr<const StoredText>> texts;
  for (auto other = in_memory_.upper_bound(used); other != in_memory_.end(); ++other) {
    if (auto text = other->second.lock()) texts.push_back(std::move(text));
  }
  return texts;
}

// Drops the least recently used disposable texts. Drops none if that is not enough.
void SessionStore::drop_disposable() {
  if (has_room()) return;
  std::size_t most = 0;
  FreedBytes freed;
  for (const auto& [used, name] : disposable_) most += freed.drop(find(name)->second.text);
  if (bytes_->memory + promised_ > options_.memory + most) refuse_room();
  for (auto it = disposable_.begin(); it != disposable_.end() && !has_room();) {
    const auto entry = find((it++)->second);
    if (FreedBytes().drop(entry->second.text) > 0) drop(entry);
  }
}

}  // namespace efla::engine
