#include "efla/io/event_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cmath>

#include "efla/io/crc32c.h"
#include "efla/io/descriptor.h"

namespace efla::io {
namespace {

template <class T>
std::string little_endian(T value) {
  static_assert(std::endian::native == std::endian::little);
  const auto bytes = std::bit_cast<std::array<char, sizeof(T)>>(value);
  return {bytes.begin(), bytes.end()};
}

std::string masked_checksum(std::string_view data) {
  return little_endian<std::uint32_t>(std::rotr(crc32c(as_bytes(data)), 15) + 0xa282ead8U);
}

// Encode protobuf messages: a field is its number and kind in a varint, followed by its value.
std::string varint(std::uint64_t x) {
  std::string text;
  for (; x >= 0x80; x >>= 7) text += static_cast<char>(x | 0x80U);
  return text + static_cast<char>(x);
}
enum Kind : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
std::string key(std::uint32_t field, Kind kind) { return varint(field << 3 | kind); }
std::string field(std::uint32_t number, double value) { return key(number, kFixed64) + little_endian(value); }
std::string field(std::uint32_t number, float value) { return key(number, kFixed32) + little_endian(value); }
std::string field(std::uint32_t number, std::int64_t value) {
  return key(number, kVarint) + varint(static_cast<std::uint64_t>(value));
}
std::string field(std::uint32_t number, const std::string& bytes) {
  return key(number, kBytes) + varint(bytes.size()) + bytes;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

std::string tf_record(std::string_view data) {
  const std::string length = little_endian<std::uint64_t>(data.size());
  return length + masked_checksum(length) + std::string(data) + masked_checksum(data);
}

std::string version_event(double wall_time) { return field(1, wall_time) + field(3, std::string("brain.Event:2")); }

std::string start_event(double wall_time, std::int64_t step) {
  const std::string session_log = field(1, std::int64_t{1});  // status: START
  return field(1, wall_time) + field(2, step) + field(7, session_log);
}

std::string scalars_event(double wall_time, std::int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const auto& scalar : scalars) summary += field(1, field(1, scalar.tag) + field(2, scalar.value));
  return field(1, wall_time) + field(2, step) + field(5, summary);
}

EventFile::EventFile(const std::filesystem::path& folder, std::int64_t first_step) {
  const double time = now();
  const auto seconds = static_cast<std::int64_t>(std::floor(time));
  path_ = (folder / fmt::format("events.out.tfevents.{:010}.{}.{}", seconds, host_name(), ::getpid())).string();
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw system_error(path_, "open it for writing");
  append(version_event(time));
  append(start_event(time, first_step));
}

EventFile::~EventFile() { ::close(descriptor_); }

void EventFile::write(std::int64_t step, std::span<const Scalar> scalars) {
  append(scalars_event(now(), step, scalars));
}

void EventFile::append(const std::string& event) { write_all(descriptor_, as_bytes(tf_record(event)), path_); }

}  // namespace efla::io
