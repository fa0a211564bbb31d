#include "efla/io/download.h"

#include <curl/curl.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <exception>
#include <memory>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/io/descriptor.h"

namespace efla::io {
namespace {

constexpr long kMaxRedirects = 5;
constexpr long kOk = 200, kPartialContent = 206, kRangeNotSatisfiable = 416;

using Handle = std::unique_ptr<CURL, decltype(&curl_easy_cleanup)>;

Handle make_handle() {
  // Runs once, before any other thread uses libcurl. C++ makes the initialization of a static thread-safe.
  static const CURLcode initialized = curl_global_init(CURL_GLOBAL_DEFAULT);
  Handle handle(initialized == CURLE_OK ? curl_easy_init() : nullptr, &curl_easy_cleanup);
  if (!handle) throw std::bad_alloc();
  return handle;
}

// The state of libcurl's C callbacks. The callbacks may not throw, so `error` keeps an exception until the transfer
// ends.
struct Transfer {
  CURL* handle;
  const Descriptor& file;
  const std::string& path;
  const DownloadProgress& progress;
  std::int64_t max_bytes;
  std::int64_t size;  // current size of the file
  bool too_big = false;
  std::exception_ptr error{};

  long status() const {
    long code = 0;
    curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &code);
    return code;
  }

  // Returns false while the server sends the page of an error.
  bool is_file() const { return status() == kOk || status() == kPartialContent; }

  bool write(ByteView bytes) {
    try {
      if (!is_file()) return true;
      too_big = std::int64_t(bytes.size()) > max_bytes - size;
      if (too_big) return false;
      write_all(file.get(), bytes, path);
      size += static_cast<std::int64_t>(bytes.size());
      return true;
    } catch (...) {
      error = std::current_exception();
      return false;
    }
  }

  bool report(std::int64_t expected) {
    try {
      if (progress && is_file()) progress(size, expected);
      return true;
    } catch (...) {
      error = std::current_exception();
      return false;
    }
  }
};

std::size_t on_bytes(char* data, std::size_t, std::size_t size, void* transfer) {
  const ByteView bytes(reinterpret_cast<const std::uint8_t*>(data), size);
  return static_cast<Transfer*>(transfer)->write(bytes) ? size : CURL_WRITEFUNC_ERROR;
}

int on_progress(void* transfer, curl_off_t total, curl_off_t now, curl_off_t, curl_off_t) {
  auto& t = *static_cast<Transfer*>(transfer);
  // libcurl counts only the bytes of this transfer; the file holds the bytes before them.
  return t.report(total == 0 ? 0 : t.size - now + total) ? 0 : 1;
}

void set_options(CURL* handle, const std::string& url, Transfer& transfer, const DownloadLimits& limits) {
  curl_easy_setopt(handle, CURLOPT_URL, url.c_str());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_FOLLOWLOCATION, 1L);
  curl_easy_setopt(handle, CURLOPT_MAXREDIRS, kMaxRedirects);
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle, CURLOPT_USERAGENT, "efla");
  curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT, static_cast<long>(limits.connect_seconds));
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME, static_cast<long>(limits.stall_seconds));
  curl_easy_setopt(handle, CURLOPT_RESUME_FROM_LARGE, static_cast<curl_off_t>(transfer.size));
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, &on_bytes);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, &transfer);
  curl_easy_setopt(handle, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(handle, CURLOPT_XFERINFOFUNCTION, &on_progress);
  curl_easy_setopt(handle, CURLOPT_XFERINFODATA, &transfer);
}

std::string why(CURLcode code, const char* details, const DownloadLimits& limits) {
  const std::string reason = details[0] != '\0' ? details : curl_easy_strerror(code);
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
      return fmt::format("cannot reach the server ({}): is there a network connection?", reason);
    case CURLE_OPERATION_TIMEDOUT:
      return fmt::format("the server did not answer within {} s or went silent for {} s ({})", limits.connect_seconds,
                         limits.stall_seconds, reason);
    case CURLE_PARTIAL_FILE:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
      return fmt::format("the connection broke off ({}): run it again to continue", reason);
    default:
      return reason;
  }
}

std::int64_t file_size(const Descriptor& file, const std::string& path) {
  struct ::stat status {};
  if (::fstat(file.get(), &status) != 0) throw system_error(path, "read its size");
  return status.st_size;
}

void truncate(const Descriptor& file, const std::string& path) {
  if (::ftruncate(file.get(), 0) != 0) throw system_error(path, "empty it");
}

// Requests the bytes that the file lacks. Returns false if the server cannot send them because it does not support
// ranges, or because its file is shorter.
bool request(const std::string& url, const Descriptor& file, const std::string& path, const DownloadProgress& progress,
             const DownloadLimits& limits) {
  if (file_size(file, path) > limits.max_bytes) truncate(file, path);
  const auto before = file_size(file, path);
  const auto handle = make_handle();
  char details[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(handle.get(), CURLOPT_ERRORBUFFER, details);
  Transfer transfer{handle.get(), file, path, progress, limits.max_bytes, before};
  set_options(handle.get(), url, transfer, limits);
  const auto code = curl_easy_perform(handle.get());
  if (transfer.error) std::rethrow_exception(transfer.error);
  const auto fail = [&](const std::string& what) { throw IoError(IoError::Kind::system, url, -1, what); };
  if (transfer.too_big) {
    truncate(file, path);
    fail(fmt::format("sends more than the {} bytes expected", limits.max_bytes));
  }
  if (before > 0 && (code == CURLE_RANGE_ERROR || transfer.status() == kRangeNotSatisfiable)) return false;
  if (transfer.status() >= 400) fail(fmt::format("the server answers with status {}", transfer.status()));
  if (code != CURLE_OK) fail(why(code, details, limits));
  return true;
}

}  // namespace

void download(const std::string& url, const std::filesystem::path& path, const DownloadProgress& progress,
              const DownloadLimits& limits) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (file.get() < 0) throw system_error(path, "open it for writing");
  try {
    if (!request(url, file, path, progress, limits)) {
      truncate(file, path);
      request(url, file, path, progress, limits);
    }
    if (::fsync(file.get()) != 0) throw system_error(path, "fsync it");
  } catch (...) {
    if (file_size(file, path) == 0) ::unlink(path.c_str());
    throw;
  }
}

}  // namespace efla::io
