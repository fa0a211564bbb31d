#include "efla/io/unpack.h"

#include <fcntl.h>
#include <lzma.h>
#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "efla/io/content_error.h"

namespace efla::io {
namespace {

constexpr std::size_t kUnpackStep = std::size_t{1} << 18;
constexpr std::uint64_t kXzMemory = std::uint64_t{1} << 30;
constexpr std::size_t kMaxStep = std::size_t{1} << 30;  // zlib counts in 32 bits
constexpr int kGzipOnly = 16;                           // added to the window bits
constexpr std::array<std::uint8_t, 2> kGzipMagic{0x1f, 0x8b};
constexpr std::size_t kZstdHeader = 18;  // most bytes of a frame's header

// The common base of the unpackers: counts packed bytes, for messages.
class Counting : public Unpacker {
 public:
  explicit Counting(std::string path) : path_(std::move(path)) {}

 protected:
  void take(ByteView& in, std::size_t count) {
    in = in.subspan(count);
    taken_ += count;
  }

  [[noreturn]] void fail(const std::string& what) const { fail_at(path_, taken_, what); }

 private:
  std::string path_;
  std::uint64_t taken_ = 0;
};

class Plain final : public Unpacker {
 public:
  std::size_t unpack(ByteView& in, bool, std::span<std::uint8_t> out) override {
    const auto count = std::min(in.size(), out.size());
    std::copy_n(in.begin(), count, out.begin());
    in = in.subspan(count);
    return count;
  }
};

class Gzip final : public Counting {
 public:
  explicit Gzip(const std::string& path) : Counting(path) {
    if (inflateInit2(&z_, MAX_WBITS + kGzipOnly) != Z_OK) throw std::bad_alloc();
  }
  ~Gzip() override { inflateEnd(&z_); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;

  std::size_t unpack(ByteView& in, bool last, std::span<std::uint8_t> out) override {
    std::size_t written = 0;
    while (written < out.size()) {
      if (ended_) {
        if (in.empty()) break;
        if (in.front() != kGzipMagic.front()) fail("bytes after the end of the gzip stream");
        inflateReset(&z_);
        ended_ = false;
      }
      const auto in_step = std::min(in.size(), kMaxStep), out_step = std::min(out.size() - written, kMaxStep);
      z_.next_in = const_cast<Bytef*>(in.data());
      z_.avail_in = static_cast<uInt>(in_step);
      z_.next_out = out.data() + written;
      z_.avail_out = static_cast<uInt>(out_step);
      const int status = inflate(&z_, Z_NO_FLUSH);
      take(in, in_step - z_.avail_in);
      written += out_step - z_.avail_out;
      if (status == Z_MEM_ERROR) throw std::bad_alloc();
      ended_ = status == Z_STREAM_END;
      if (status != Z_OK && status != Z_BUF_ERROR && !ended_) {
        fail(std::string("gzip stream is corrupt (") + (z_.msg != nullptr ? z_.msg : "needs a dictionary") + ")");
      }
      if (!ended_ && in.empty() && z_.avail_out > 0) {
        if (last) fail("gzip stream is cut short");
        break;
      }
    }
    return written;
  }

 private:
  z_stream z_{};
  bool ended_ = false;
};

class Xz final : public Counting {
 public:
  explicit Xz(const std::string& path) : Counting(path) {
    if (lzma_stream_decoder(&z_, kXzMemory, LZMA_CONCATENATED) != LZMA_OK) throw std::bad_alloc();
  }
  ~Xz() override { lzma_end(&z_); }
  Xz(const Xz&) = delete;
  Xz& operator=(const Xz&) = delete;

  std::size_t unpack(ByteView& in, bool last, std::span<std::uint8_t> out) override {
    std::size_t written = 0;
    while (written < out.size() && !ended_) {
      z_.next_in = in.data();
      z_.avail_in = in.size();
      z_.next_out = out.data() + written;
      z_.avail_out = out.size() - written;
      const auto status = lzma_code(&z_, last ? LZMA_FINISH : LZMA_RUN);
      take(in, in.size() - z_.avail_in);
      written = out.size() - z_.avail_out;
      ended_ = status == LZMA_STREAM_END;
      if (status == LZMA_MEM_ERROR) throw std::bad_alloc();
      if (status == LZMA_MEMLIMIT_ERROR) fail("xz stream needs more than 1 GiB of memory");
      if (status != LZMA_OK && status != LZMA_BUF_ERROR && !ended_) {
        fail("xz stream is corrupt, or followed by something else");
      }
      if (!ended_ && in.empty() && z_.avail_out > 0) {
        if (last && status == LZMA_BUF_ERROR) fail("xz stream is cut short");
        if (!last) break;
      }
    }
    return written;
  }

 private:
  lzma_stream z_ = LZMA_STREAM_INIT;
  bool ended_ = false;
};

class Zstd final : public Counting {
 public:
  explicit Zstd(const std::string& path) : Counting(path), z_(ZSTD_createDCtx(), &ZSTD_freeDCtx) {
    if (z_ == nullptr) throw std::bad_alloc();
  }

  std::size_t unpack(ByteView& in, bool last, std::span<std::uint8_t> out) override {
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    while (to.pos < to.size && !(ended_ && in.empty())) {
      // Passes a frame's first bytes one by one, because the library would check a frame that it gets whole more
      // strictly than a frame in pieces.
      ZSTD_inBuffer from{in.data(), header_.size() < kZstdHeader ? std::min<std::size_t>(in.size(), 1) : in.size(), 0};
      const auto before = to.pos;
      const auto status = ZSTD_decompressStream(z_.get(), &to, &from);
      if (header_.size() < kZstdHeader) header_.insert(header_.end(), in.begin(), in.begin() + from.pos);
      frame_bytes_ += to.pos - before;
      take(in, from.pos);
      if (ZSTD_isError(status) != 0) {
        fail(std::string("zstd stream is corrupt, or followed by something else (") + ZSTD_getErrorName(status) + ")");
      }
      ended_ = status == 0;
      if (ended_) end_frame();
      if (!ended_ && in.empty() && to.pos < to.size) {
        if (last) fail("zstd stream is cut short");
        break;
      }
    }
    return to.pos;
  }

 private:
  // Compares the size that the frame's header declares with the size of the unpacked frame, because the library does so
  // only if the last block is not empty.
  void end_frame() {
    const auto declared = ZSTD_getFrameContentSize(header_.data(), header_.size());
    if (declared != ZSTD_CONTENTSIZE_UNKNOWN && declared != frame_bytes_) {
      fail("zstd frame of " + std::to_string(frame_bytes_) + " bytes, expected the " + std::to_string(declared) +
           " that its header declares");
    }
    header_.clear();
    frame_bytes_ = 0;
  }

  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> z_;
  Bytes header_;  // of the current frame, as far as it was read
  std::uint64_t frame_bytes_ = 0;
  bool ended_ = false;
};

Descriptor open_input(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) throw system_error(path, "open it");
  struct ::stat status {};
  if (::fstat(file.get(), &status) != 0) throw system_error(path, "read its size");
  if (S_ISDIR(status.st_mode)) fail_in(path, "is a folder, expected a file");
  return file;
}

}  // namespace

Packing packing_of(ByteView bytes) {
  constexpr std::array<std::uint8_t, 6> kXz{0xfd, '7', 'z', 'X', 'Z', 0};
  constexpr std::array<std::uint8_t, 4> kZstd{0x28, 0xb5, 0x2f, 0xfd};
  const auto begins_with = [&](ByteView magic) {
    return bytes.size() >= magic.size() && std::equal(magic.begin(), magic.end(), bytes.begin());
  };
  if (begins_with(kGzipMagic)) return Packing::gzip;
  if (begins_with(kXz)) return Packing::xz;
  if (begins_with(kZstd)) return Packing::zstd;
  return Packing::none;
}

std::unique_ptr<Unpacker> make_unpacker(Packing packing, const std::string& path) {
  switch (packing) {
    case Packing::gzip:
      return std::make_unique<Gzip>(path);
    case Packing::xz:
      return std::make_unique<Xz>(path);
    case Packing::zstd:
      return std::make_unique<Zstd>(path);
    case Packing::none:
      break;
  }
  return std::make_unique<Plain>();
}

UnpackedFile::UnpackedFile(const std::filesystem::path& path) : path_(path), file_(open_input(path_)) {
  refill();
  packing_ = packing_of(unread_);
  unpacker_ = make_unpacker(packing_, path_);
}

std::size_t UnpackedFile::read(std::span<std::uint8_t> out) {
  std::size_t filled = 0;
  while (filled < out.size()) {
    if (unread_.empty() && !at_end_) refill();
    const auto count = unpacker_->unpack(unread_, at_end_, out.subspan(filled));
    filled += count;
    if (count == 0 && unread_.empty() && at_end_) break;
  }
  return filled;
}

void UnpackedFile::refill() {
  buffer_.resize(kUnpackStep);
  std::size_t size = 0;
  while (size < buffer_.size() && !at_end_) {
    const auto n = ::read(file_.get(), buffer_.data() + size, buffer_.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw system_error(path_, "read it");
    at_end_ = n == 0;
    size += static_cast<std::size_t>(n);
  }
  position_ += size;
  unread_ = ByteView(buffer_).first(size);
}

}  // namespace efla::io
