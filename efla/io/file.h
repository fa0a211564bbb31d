// Files: reading them whole or mapped, and writing them so that a reader sees the old content or the new, never a part.
// Every function throws efla::IoError with the path and the system's message.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace efla::io {

using Bytes = std::vector<std::uint8_t>;
using ByteView = std::span<const std::uint8_t>;

inline ByteView as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Returns the content of a file. Throws IoError(content) if it has more than max_bytes.
Bytes read_file(const std::filesystem::path& path, std::size_t max_bytes = SIZE_MAX);

// A regular file, mapped read-only. The bytes stay in place if the object is moved. The program ends with SIGBUS if
// another process truncates the file while it is mapped, so map only files that are replaced by renaming, as AtomicFile
// does.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  ByteView bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

// A file under a temporary name beside its target. commit() fsyncs it and renames it to the target. Without commit()
// the file is removed and the target is unchanged. If the target is a link, the file that it points to is written. A
// target that is not a regular file is refused.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(ByteView bytes);
  void write(std::string_view text) { write(as_bytes(text)); }
  // Overwrites bytes that were written before, such as a header that counts what follows it.
  void overwrite(std::uint64_t offset, ByteView bytes);
  void commit();

 private:
  void flush();
  void write_through(ByteView bytes);

  std::filesystem::path target_, temporary_;
  int descriptor_ = -1;
  Bytes buffer_;
};

// Returns whether AtomicFile gives such a name to its temporary files. A process that was killed leaves them.
bool is_temporary_name(const std::string& name);

// A folder under a hidden temporary name beside its target, for files that belong together. commit() fsyncs the folder,
// but not its files, and renames it to the target, which must not exist or be an empty folder. Without commit() the
// folder is removed with its files. The constructor removes what killed processes left for the same target.
class AtomicFolder {
 public:
  explicit AtomicFolder(const std::filesystem::path& path);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::filesystem::path& path() const { return temporary_; }
  void commit();

 private:
  std::filesystem::path target_, temporary_;
  bool committed_ = false;
};

// Removes the temporary files that AtomicFiles of killed processes left in a folder; with `name`, only those for the
// target of that name. Leaves the files of running processes. Files with this process's id count as an earlier
// process's, so a command calls this function before it writes there.
void remove_stale_temporaries(const std::filesystem::path& folder, const std::string& name = {});

void write_file_atomically(const std::filesystem::path& path, ByteView bytes);
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

}  // namespace efla::io
