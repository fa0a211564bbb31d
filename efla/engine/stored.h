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
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/io/crc32c.h"
#include "efla/io/descriptor.h"
#include "efla/io/file.h"

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

// Values in memory or in a file. Functions may be called by several threads at once.
template <class T>
class Stored {
 public:
  explicit Stored(std::vector<T> values) : values_(std::move(values)), size_(values_.size()) {}
  ~Stored() {
    if (total_) (file_.empty() ? total_->memory : total_->files) -= bytes();
    std::error_code none;
    if (!file_.empty()) std::filesystem::remove(file_, none);
  }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }
  bool in_memory() const { return !in_file_; }  // without waiting for a file that is being written

  // Adds the bytes of the values to `total` until the object dies. Only the first call does so.
  void count(const std::shared_ptr<StoredBytes>& total) {
    const std::lock_guard lock(mutex_);
    if (total_) return;
    total_ = total;
    total_->memory += bytes();
  }

  // Copies the values, from the file if they are there. Throws IoError.
  void copy_to(std::span<T> to) const {
    const std::lock_guard lock(mutex_);
    if (file_.empty()) {
      std::copy(values_.begin(), values_.end(), to.begin());
      return;
    }
    const io::Bytes content = io::read_file(file_);
    const auto fail = [&](const std::string& what) { throw IoError(IoError::Kind::system, file_.string(), -1, what); };
    if (content.size() != bytes()) {
      fail(std::to_string(content.size()) + " bytes, expected " + std::to_string(bytes()));
    }
    if (io::crc32c(content) != checksum_) fail("its bytes are not the ones that were written: the checksum differs");
    std::memcpy(to.data(), content.data(), bytes());
  }

  // Moves the values to a new file of the folder; waits if another thread is moving them. Throws IoError; the values
  // then stay in memory.
  void swap_out(const std::filesystem::path& folder) {
    const std::lock_guard lock(mutex_);
    if (!file_.empty() || size_ == 0) return;
    if (total_) total_->moving += bytes();
    const auto file = folder / new_swap_name();
    const io::ByteView content(reinterpret_cast<const std::uint8_t*>(values_.data()), bytes());
    try {
      io::Descriptor out(::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
      if (out.get() < 0) throw io::system_error(file, "create it");
      io::write_all(out.get(), content, file);
      if (::close(out.release()) != 0) throw io::system_error(file, "write to it");
    } catch (...) {
      std::error_code none;
      std::filesystem::remove(file, none);
      if (total_) total_->moving -= bytes();
      throw;
    }
    checksum_ = io::crc32c(content);
    file_ = file;
    in_file_ = true;
    std::vector<T>().swap(values_);
    if (total_) {
      total_->moving -= bytes();  // first: see StoredBytes::staying
      total_->memory -= bytes();
      total_->files += bytes();
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<T> values_;
  std::size_t size_;
  std::filesystem::path file_;
  std::uint32_t checksum_ = 0;  // of the file
  std::atomic<bool> in_file_ = false;
  std::shared_ptr<StoredBytes> total_;
};

// The floats of a model's state; the ids of a text.
using StoredState = Stored<float>;
using StoredIds = Stored<std::int32_t>;

}  // namespace efla::engine
