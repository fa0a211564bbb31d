// Values that never change, but may move to a file, and the bytes that they take together.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/io/crc32c.h"
#include "efla/io/descriptor.h"
#include "efla/io/file.h"
#include "efla/nn/inference/text_run.h"

namespace efla::engine {

// The bytes of values in memory and in files. moving: the bytes in memory that are on the way to files.
struct StoredBytes {
  std::atomic<std::size_t> memory = 0, files = 0, moving = 0;

  // Returns the bytes that will stay in memory after the current writes.
  std::size_t staying() const {
    const std::size_t all = memory;  // read first, so that a move that ends in between is not subtracted twice
    return all - std::min(all, moving.load());
  }
};

// Bytes of memory that are counted as long as the object lives. A copy is not counted.
class CountedBytes {
 public:
  CountedBytes() = default;
  CountedBytes(const CountedBytes&) {}
  CountedBytes& operator=(const CountedBytes&) = delete;
  ~CountedBytes() {
    if (total_) total_->memory -= bytes_;
  }

  void count(const std::shared_ptr<StoredBytes>& total, std::size_t bytes) {
    if (total_) return;
    total_ = total;
    bytes_ = bytes;
    total_->memory += bytes;
  }

 private:
  std::shared_ptr<StoredBytes> total_;
  std::size_t bytes_ = 0;
};

constexpr const char* kSwapEnd = ".efla-swap";  // of the names of files that values move to

// Returns a name that no other file has: processes in different containers may have the same id.
inline std::string new_swap_name() {
  static const auto process = std::uint64_t{std::random_device()()} << 32 | std::random_device()();
  static std::atomic<std::uint64_t> count{0};
  return std::to_string(process) + "-" + std::to_string(count++) + kSwapEnd;
}

// Values, a vector, in memory or in a file. Whatever runs may share the memory. Functions may be called by several
// threads at once.
template <class Values>
class Stored {
 public:
  using Memory = std::shared_ptr<const Values>;

  explicit Stored(Memory values) : values_(std::move(values)), size_(values_->size()) {}
  explicit Stored(Values values) : Stored(std::make_shared<const Values>(std::move(values))) {}
  ~Stored() {
    if (total_) (file_.empty() ? total_->memory : total_->files) -= bytes();
    std::error_code none;
    if (!file_.empty()) std::filesystem::remove(file_, none);
  }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(typename Values::value_type); }
  bool in_memory() const {
    const std::lock_guard lock(mutex_);
    return file_.empty();
  }

  // Adds the bytes of the values to `total` until the object dies. Only the first call does so.
  void count(const std::shared_ptr<StoredBytes>& total) {
    const std::lock_guard lock(mutex_);
    if (total_) return;
    total_ = total;
    total_->memory += bytes();
  }
  bool is_counted() const {
    const std::lock_guard lock(mutex_);
    return total_ != nullptr;
  }

  // Returns the values, from the file if they are there. Callers of the same time share the memory. Throws IoError.
  Memory get() const {
    const std::lock_guard lock(mutex_);
    if (file_.empty()) return values_;
    if (auto shared = read_.lock()) return shared;
    const io::Bytes content = io::read_file(file_);
    const auto fail = [&](const std::string& what) { throw IoError(IoError::Kind::system, file_.string(), -1, what); };
    if (content.size() != bytes()) {
      fail(std::to_string(content.size()) + " bytes, expected " + std::to_string(bytes()));
    }
    if (io::crc32c(content) != checksum_) fail("its bytes are not the ones that were written: the checksum differs");
    const auto values = std::make_shared<Values>(size_);
    std::memcpy(values->data(), content.data(), bytes());
    read_ = values;
    return values;
  }
  // Says that the caller is going to move the values to a file: they count as moving until swap_out or unclaim. Returns
  // false where another caller is, and where the values are in a file.
  bool claim() {
    const std::lock_guard lock(mutex_);
    if (claimed_ || !file_.empty() || size_ == 0) return false;
    claimed_ = true;
    if (total_) total_->moving += bytes();
    return true;
  }
  void unclaim() {
    const std::lock_guard lock(mutex_);
    claimed_ = false;
    if (total_) total_->moving -= bytes();
  }

  // Moves values that the caller has claimed to a new file of the folder. Throws IoError; the values then stay in
  // memory, and claimed.
  void swap_out(const std::filesystem::path& folder) {
    const auto file = folder / new_swap_name();
    const io::ByteView content(reinterpret_cast<const std::uint8_t*>(values_->data()), bytes());
    try {
      io::Descriptor out(::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
      if (out.get() < 0) throw io::system_error(file, "create it");
      io::write_all(out.get(), content, file);
      if (::close(out.release()) != 0) throw io::system_error(file, "write to it");
    } catch (...) {
      std::error_code none;
      std::filesystem::remove(file, none);
      throw;
    }
    const auto checksum = io::crc32c(content);
    const std::lock_guard lock(mutex_);
    checksum_ = checksum;
    file_ = file;
    read_ = std::exchange(values_, nullptr);
    if (total_) {
      total_->moving -= bytes();  // first: see StoredBytes::staying
      total_->memory -= bytes();
      total_->files += bytes();
    }
  }

 private:
  mutable std::mutex mutex_;                  // guards the members that follow
  Memory values_;                             // null: in the file
  mutable std::weak_ptr<const Values> read_;  // memory that has the values of the file
  const std::size_t size_;
  bool claimed_ = false;
  std::filesystem::path file_;
  std::uint32_t checksum_ = 0;  // of the file
  std::shared_ptr<StoredBytes> total_;
};

using StoredIds = Stored<std::vector<std::int32_t>>;  // of a text
using StoredPage = Stored<nn::PageBytes>;

// The stored pages by the ids of the pages in memory, so that states with the same page store it once, also while it is
// in a file. Several threads may call functions at once.
class StoredPages {
 public:
  // Returns the stored page of a page.
  std::shared_ptr<StoredPage> of(const nn::Page& page) {
    const std::lock_guard lock(mutex_);
    auto& known = pages_[page->id];
    if (auto stored = known.lock()) return stored;
    auto stored = std::make_shared<StoredPage>(page);
    known = stored;
    forget_dead();
    return stored;
  }
  // Returns the memory of a stored page. Throws IoError.
  nn::Page read(const std::shared_ptr<StoredPage>& stored) {
    auto page = stored->get();
    const std::lock_guard lock(mutex_);
    pages_[page->id] = stored;
    return page;
  }
  // Returns a page with the bytes of a file: the one of an earlier call if it had the same bytes and is in memory.
  nn::Page load(io::ByteView bytes) {
    const auto content = std::as_bytes(bytes);
    const auto checksum = io::crc32c(bytes);
    const std::lock_guard lock(mutex_);
    auto& known = loaded_[checksum];
    if (auto page = known.lock(); page && std::ranges::equal(*page, content)) return page;
    auto page = std::make_shared<const nn::PageBytes>(content.begin(), content.end());
    known = page;
    forget_dead();
    return page;
  }

 private:
  // Bounds the memory of entries whose pages are gone by the memory of the others.
  void forget_dead() {
    if (pages_.size() + loaded_.size() < 2 * alive_) return;
    const auto is_dead = [](const auto& entry) { return entry.second.expired(); };
    std::erase_if(pages_, is_dead);
    std::erase_if(loaded_, is_dead);
    alive_ = std::max<std::size_t>(pages_.size() + loaded_.size(), 64);
  }

  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::weak_ptr<StoredPage>> pages_;            // by id
  std::unordered_map<std::uint32_t, std::weak_ptr<const nn::PageBytes>> loaded_;  // from files, by checksum
  std::size_t alive_ = 64;                                                        // after the last call of forget_dead
};

// A TextState that is stored.
class StoredState {
 public:
  StoredState(const nn::TextState& state, std::shared_ptr<StoredPages> pages)
      : tokens_(state.tokens), constant_(state.constant), all_pages_(std::move(pages)) {
    for (const auto& page : state.pages) pages_.push_back(all_pages_->of(page));
  }

  // Throws IoError.
  nn::TextState get() const {
    nn::TextState state{tokens_, constant_.get()};
    for (const auto& page : pages_) state.pages.push_back(all_pages_->read(page));
    return state;
  }
  const std::vector<std::shared_ptr<StoredPage>>& pages() const { return pages_; }
  std::size_t constant_bytes() const { return constant_.bytes(); }
  // Calls f with everything that may move to a file.
  template <class F>
  void for_each_part(F&& f) {
    f(constant_);
    for (const auto& page : pages_) f(*page);
  }

 private:
  std::int64_t tokens_;
  Stored<std::vector<float>> constant_;
  std::shared_ptr<StoredPages> all_pages_;
  std::vector<std::shared_ptr<StoredPage>> pages_;
};

}  // namespace efla::engine
