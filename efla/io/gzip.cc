#include "efla/io/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <memory>

#include "efla/base/error.h"

namespace efla::io {
namespace {

// zlib counts in 32 bits.
constexpr std::size_t kMaxStep = std::size_t{1} << 30;
constexpr std::size_t kFirstOutput = std::size_t{1} << 16;
constexpr int kGzipOnly = 16;  // added to the window bits: refuses raw deflate and zlib headers

struct Inflate {
  z_stream stream{};
  Inflate() {
    if (inflateInit2(&stream, MAX_WBITS + kGzipOnly) != Z_OK) throw std::bad_alloc();
  }
  ~Inflate() { inflateEnd(&stream); }
  Inflate(const Inflate&) = delete;
  Inflate& operator=(const Inflate&) = delete;
};

}  // namespace

bool is_gzip(ByteView bytes) { return bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b; }

Bytes gunzip(ByteView packed, const std::string& path, std::size_t max_bytes) {
  max_bytes = std::min(max_bytes, SIZE_MAX - 1);
  Inflate inflater;
  auto& z = inflater.stream;
  std::size_t read = 0, written = 0;
  const auto fail = [&](const std::string& what) {
    throw IoError(IoError::Kind::content, path, static_cast<std::int64_t>(read), what);
  };
  Bytes out(std::min(max_bytes, kFirstOutput));
  for (;;) {
    // One byte more than the limit shows whether the limit is exceeded.
    if (written == out.size()) out.resize(std::min(out.size() * 2 + 1, max_bytes + 1));
    const auto in_step = std::min(packed.size() - read, kMaxStep);
    const auto out_step = std::min(out.size() - written, kMaxStep);
    z.next_in = const_cast<Bytef*>(packed.data() + read);
    z.avail_in = static_cast<uInt>(in_step);
    z.next_out = out.data() + written;
    z.avail_out = static_cast<uInt>(out_step);
    const int status = inflate(&z, Z_NO_FLUSH);
    read += in_step - z.avail_in;
    written += out_step - z.avail_out;
    if (written > max_bytes) fail("gzip stream unpacks to more than " + std::to_string(max_bytes) + " bytes");
    if (status == Z_STREAM_END) {
      if (read == packed.size()) break;
      if (!is_gzip(packed.subspan(read))) fail("bytes after the end of the gzip stream");
      inflateReset(&z);
    } else if (status == Z_MEM_ERROR) {
      throw std::bad_alloc();
    } else if (status == Z_BUF_ERROR || (status == Z_OK && read == packed.size() && z.avail_out > 0)) {
      fail("gzip stream is cut short");
    } else if (status != Z_OK) {
      fail(std::string("gzip stream is corrupt (") + (z.msg != nullptr ? z.msg : "needs a dictionary") + ")");
    }
  }
  out.resize(written);
  return out;
}

MaybeGzip read_maybe_gzip(const std::filesystem::path& path, std::size_t max_bytes) {
  auto bytes = read_file(path, max_bytes);
  if (!is_gzip(bytes)) return {std::move(bytes), false};
  return {gunzip(bytes, path.string(), max_bytes), true};
}

}  // namespace efla::io
