#include "efla/engine/session_store.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "efla/base/error.h"
#include "efla/engine/session_files.h"
#include "efla/io/file.h"
#include "efla/io/sha256.h"

namespace efla::engine {
namespace {

void check_name(const std::string& name) {
  if (is_session_name(name)) return;
  throw Error("engine", "session", "'" + name.substr(0, 128) + "'",
              "a name of 1 to 128 letters, digits and characters of \"._-\"");
}

std::size_t bytes_of(const SessionRecord& record) {
  return record.pending.size() * sizeof(record.pending[0]) + record.last_ids.size() * sizeof(record.last_ids[0]) +
         record.seen.size() + record.held.size();
}

// Returns the bytes of a text in memory and files: with what it shares with others, or only what storing it adds.
std::size_t bytes_of(const StoredText& text, bool only_added = false) {
  std::size_t bytes = text.record_bytes();
  std::unordered_set<const void*> seen;
  text.for_each_part([&](const auto& part) {
    if (seen.insert(&part).second && !(only_added && part.is_counted())) bytes += part.bytes();
  });
  return bytes;
}

// Returns whether every part of a text is in memory.
bool is_in_memory(const StoredText& text) {
  bool all = true;
  text.for_each_part([&](const auto& part) { all = all && part.in_memory(); });
  return all;
}

}  // namespace

std::size_t StoredText::record_bytes() const {
  return sizeof(StoredText) + bytes_of(record) + (before ? sizeof(StoredText) + bytes_of(before->record) : 0);
}

SessionStore::SessionStore(StoreOptions options, SessionFormat format)
    : options_(std::move(options)), format_(std::move(format)) {
  if (!options_.swap.empty()) {
    swap_lock_.emplace(io::lock_folder(options_.swap, "engine", "swap"));
    for (const auto& file : std::filesystem::directory_iterator(options_.swap)) {
      std::error_code none;
      if (file.path().extension() == kSwapEnd) std::filesystem::remove(file, none);
    }
  }
  if (options_.sessions.empty()) return;
  files_ = std::make_unique<SessionFiles>(*this, options_.sessions);
}

SessionStore::~SessionStore() = default;

void SessionStore::load_files() {
  if (!files_) return;
  std::map<std::string, std::string> names;                     // name of the first session by the checksum of its file
  std::vector<std::pair<std::filesystem::path, Error>> others;  // files that this engine does not continue
  bool any = false;
  for (const auto& file : files_->found()) {
    try {
      load_file(file, names);
      any = true;
    } catch (const NoRoom&) {
      throw;
    } catch (const IoError& error) {
      if (error.kind() != IoError::Kind::content && error.path() != file) throw;  // of another file
      files_->set_aside(file, error.what());
    } catch (const Error& error) {
      others.emplace_back(file, error);
    }
  }
  if (!others.empty() && !any) {
    const auto& [file, error] = others.front();
    throw Error("engine", "sessions", file.string() + " (" + error.got() + ")", error.expected());
  }
  for (const auto& [file, error] : others) files_->set_aside(file, error.got());
  files_->remove_dropped();
}

// Loads the session of a file. Session files of the same bytes are forks and share the memory again.
void SessionStore::load_file(const std::filesystem::path& file, std::map<std::string, std::string>& names) {
  const std::string name = file.stem().string();
  const auto content = io::read_file(file);
  const std::string_view bytes(reinterpret_cast<const char*>(content.data()), content.size());
  const auto session = format_.read(bytes, "session " + name, pages_);
  try {
    const auto [first, fresh] = names.emplace(io::sha256(content), name);
    if (!fresh && !session.disposable) {
      add_fork(first->second, name);
    } else {
      insert(reserve(name, bytes_of(*session.text, /*only_added=*/true)), session.text, session.disposable);
    }
  } catch (const NoRoom&) {
    if (!session.disposable) throw;
  }
  files_->add(name);
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
  auto& [text, bytes, used, disposable] = entry->second;
  const auto move = [this](auto& order, std::uint64_t from) {
    auto node = order.extract(from);
    if (!node) return;
    node.key() = now_;
    order.insert(std::move(node));
  };
  ++now_;
  move(in_memory_, std::exchange(text->used, now_));
  move(disposable_, std::exchange(used, now_));
}

void SessionStore::drop(Entries::iterator entry) {
  disposable_.erase(entry->second.used);
  entries_.erase(entry);
}

void SessionStore::drop_surplus() {
  while (std::cmp_greater(disposable_.size(), options_.max_disposable)) drop(find(disposable_.begin()->second));
}

// Counts the bytes of a text as long as somebody holds it. mutex_ must be held.
void SessionStore::hold(const std::shared_ptr<StoredText>& text) {
  text->for_each_part([&](auto& part) { part.count(bytes_); });
  text->counted.count(bytes_, text->record_bytes());
  if (options_.swap.empty()) return;
  if (in_memory_.size() > 2 * (entries_.size() + reserved_.size())) {
    std::erase_if(in_memory_, [](const auto& text_of_use) { return text_of_use.second.expired(); });
  }
  in_memory_[now_ + 1] = text;
  text->used = ++now_;
}

// mutex_ must be held.
void SessionStore::put(const std::string& name, const std::shared_ptr<StoredText>& text, std::size_t bytes,
                       bool disposable) {
  hold(text);
  const auto used = ++now_;
  Entries entry;
  entry[name] = {text, bytes, used, disposable};
  std::map<std::uint64_t, std::string> disposables;
  if (disposable) disposables[used] = name;
  // Nothing throws from here on, so that an older text is lost only for a new one.
  if (const auto old = entries_.find(name); old != entries_.end()) drop(old);
  entries_.merge(entry);
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

bool SessionStore::contains(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(name);
}

std::optional<std::string> SessionStore::file_bytes(const std::string& name) const {
  Entry entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(name);
    if (found == entries_.end()) return std::nullopt;
    entry = found->second;
  }
  return format_.bytes(*entry.text, entry.disposable);
}

void SessionStore::load(const std::string& name, std::string_view bytes) {
  const auto text = format_.read(bytes, "session " + name, pages_).text;
  insert(reserve(name, bytes_of(*text, /*only_added=*/true)), text, /*disposable=*/false);
  if (files_ && SessionFiles::has_file(name)) files_->keep(name);
}

std::shared_ptr<const StoredText> SessionStore::read(std::string_view bytes) {
  auto text = format_.read(bytes, "session", pages_).text;
  insert(reserve("", bytes_of(*text, /*only_added=*/true)), text, /*disposable=*/false);
  return text;
}

void SessionStore::fork(const std::string& name, const std::string& copy) {
  add_fork(name, copy);
  if (files_ && SessionFiles::has_file(copy)) files_->keep(copy);
}

void SessionStore::add_fork(const std::string& name, const std::string& copy) {
  check_name(copy);
  const std::lock_guard lock(mutex_);
  const auto found = find(name);
  use(found);
  require_free(copy);
  if (entries_.contains(copy)) throw Error("engine", "copy", "'" + copy + "', which exists", "a new name");
  entries_[copy] = {found->second.text, found->second.bytes, ++now_};
}

void SessionStore::erase(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = find(name);
    require_free(name);
    drop(found);
  }
  if (files_) files_->remove_dropped(name);
}

void SessionStore::make_disposable(const std::string& name) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = find(name);
    require_free(name);
    found->second.disposable = true;
    disposable_[found->second.used] = name;
    drop_surplus();
  }
  if (files_ && SessionFiles::has_file(name)) files_->keep(name);
}

SessionStore::Reservation SessionStore::reserve(const std::string& name, std::size_t bytes) {
  if (!name.empty()) check_name(name);
  std::unique_lock lock(mutex_);
  require_free(name);
  if (!name.empty()) reserved_.insert(name);
  promised_ += bytes;
  try {
    if (bytes > 0) make_room(lock);
    return Reservation(*this, name, bytes);
  } catch (...) {
    reserved_.erase(name);
    promised_ -= bytes;
    throw;
  }
}

// Ends a reservation. mutex_ must be held.
void SessionStore::end(Reservation& reservation) {
  promised_ -= reservation.bytes_;
  reserved_.erase(reservation.name_);
  reservation.store_ = nullptr;
}

SessionStore::Reservation::~Reservation() {
  if (store_ == nullptr) return;
  const std::lock_guard lock(store_->mutex_);
  store_->end(*this);
}

// The text is released before the function returns, because the reply's client may erase it and expect its memory back.
void SessionStore::insert(Reservation reservation, std::shared_ptr<StoredText> text, bool disposable) {
  const std::size_t bytes = bytes_of(*text);
  std::unique_lock lock(mutex_);
  end(reservation);
  reservation.name_.empty() ? hold(text) : put(reservation.name_, text, bytes, disposable);
  if (options_.swap.empty()) return;
  try {
    swap_until([this] { return bytes_->staying() <= options_.memory; }, lock);
  } catch (const std::exception&) {  // the next caller that needs room gets the error
  }
}

void SessionStore::store(Reservation reservation, std::shared_ptr<StoredText> text, bool disposable,
                         std::function<void(const std::string& error)> then) {
  const std::string name = reservation.name_;
  insert(std::move(reservation), std::move(text), disposable);
  if (files_ && SessionFiles::has_file(name)) return files_->keep_later(name, std::move(then));
  then("");
}

// Returns what is known of a session without a look at its pages.
SessionInfo SessionStore::info_of(const std::string& name, const Entry& entry) const {
  SessionInfo info{name, entry.text->tokens(), entry.text->rewindable()};
  const auto& record = entry.text->record;
  info.pending = static_cast<std::int64_t>(record.pending.size());
  info.seed = record.counters[0];
  info.draws = record.counters[1];
  if (!record.last_ids.empty()) info.last_id = record.last_ids.back();
  info.bytes = entry.bytes;
  info.in_use = reserved_.contains(name);
  info.disposable = entry.disposable;
  return info;
}

std::vector<SessionInfo> SessionStore::list() const {
  std::vector<SessionInfo> all;
  std::vector<std::shared_ptr<const StoredText>> texts;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, entry] : entries_) {
      all.push_back(info_of(name, entry));
      if (!options_.swap.empty()) texts.push_back(entry.text);
    }
  }
  for (std::size_t i = 0; i < texts.size(); ++i) all[i].in_memory = is_in_memory(*texts[i]);
  return all;
}

SessionInfo SessionStore::info(const std::string& name) const {
  SessionInfo info;
  std::shared_ptr<const StoredText> text;
  {
    const std::lock_guard lock(mutex_);
    const auto found = find(name);
    info = info_of(name, found->second);
    if (!options_.swap.empty()) text = found->second.text;
  }
  if (text) info.in_memory = is_in_memory(*text);
  return info;
}

std::int64_t SessionStore::size() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(entries_.size());
}

}  // namespace efla::engine
