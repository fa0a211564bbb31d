// Files read as a stream that is unpacked on the way: gzip, xz, zstd, or plain.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "efla/io/descriptor.h"
#include "efla/io/file.h"

namespace efla::io {

enum class Packing { none, gzip, xz, zstd };

// Returns the packing by the first bytes of a file.
Packing packing_of(ByteView bytes);

// Unpacks bytes piece by piece. The packed data is one stream or several concatenated streams.
class Unpacker {
 public:
  virtual ~Unpacker() = default;

  // Consumes bytes from the front of `in`, writes unpacked bytes to `out` as long as there is room, and returns the
  // number of bytes written. `last` says that nothing follows `in`. Throws IoError(content) with the offset in the
  // packed bytes if a stream is corrupt, truncated, followed by other data, or needs more memory than the limit for its
  // format.
  virtual std::size_t unpack(ByteView& in, bool last, std::span<std::uint8_t> out) = 0;
};

// Returns the unpacker for a packing. path is for messages.
std::unique_ptr<Unpacker> make_unpacker(Packing packing, const std::string& path);

// A file, unpacked. Memory: what the packing needs, at most 1 GiB for xz and 128 MiB for zstd.
class UnpackedFile {
 public:
  explicit UnpackedFile(const std::filesystem::path& path);

  // Fills `out` and returns the number of bytes, which is smaller only at the end. Throws like Unpacker, and IoError if
  // the disk fails.
  std::size_t read(std::span<std::uint8_t> out);

  // Returns the number of bytes of the file that were consumed.
  std::uint64_t position() const { return position_ - unread_.size(); }
  Packing packing() const { return packing_; }

 private:
  void refill();

  std::string path_;
  Descriptor file_;
  Bytes buffer_;
  ByteView unread_;
  bool at_end_ = false;
  std::uint64_t position_ = 0;
  Packing packing_ = Packing::none;
  std::unique_ptr<Unpacker> unpacker_;
};

}  // namespace efla::io
