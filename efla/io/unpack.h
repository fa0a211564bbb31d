// Files read in a stream, unpacked on the way: gzip, xz, zstd, or as they are.
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

// By the first bytes.
Packing packing_of(ByteView bytes);

// Turns packed bytes into what they stand for, part by part: one stream, or several one after the other.
class Unpacker {
 public:
  virtual ~Unpacker() = default;

  // Takes bytes from the front of `in`, fills `out` as far as they go and returns how far. `last` says that nothing
  // will follow `in`. Throws IoError(content) with the offset in the packed bytes where a stream is corrupt, cut short,
  // followed by anything else, or asks for more memory than its format is allowed here.
  virtual std::size_t unpack(ByteView& in, bool last, std::span<std::uint8_t> out) = 0;
};

// path is for messages.
std::unique_ptr<Unpacker> make_unpacker(Packing packing, const std::string& path);

// A file, unpacked. Memory: what its packing needs, at most 1 GiB for xz and 128 MiB for zstd.
class UnpackedFile {
 public:
  explicit UnpackedFile(const std::filesystem::path& path);

  // Fills `out` and returns how much: less only at the end. Throws as Unpacker does, and IoError for the disk.
  std::size_t read(std::span<std::uint8_t> out);

  // Bytes of the file that have been taken.
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
