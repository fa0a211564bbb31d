// TensorBoard's event files: scalars over steps. TFRecord framing (tensorflow/core/lib/io/record_writer.h) around
// protobuf messages Event (tensorflow/core/util/event.proto), of which only what scalars need is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "efla/io/file.h"

namespace efla::io {

// CRC-32C (Castagnoli; RFC 3720, appendix B.4).
std::uint32_t crc32c(ByteView bytes);

// A record: its length, the length's checksum, the data, the data's checksum. The checksums are masked: rotated right
// by 15 bits, plus 0xa282ead8.
std::string tf_record(std::string_view data);

struct Scalar {
  std::string tag;
  float value = 0.0F;
};

// Messages of type Event. wall_time in seconds since 1970.
std::string version_event(double wall_time);
// From here on steps are counted anew from `step`: readers drop what earlier files say about it and later ones.
std::string start_event(double wall_time, std::int64_t step);
std::string scalars_event(double wall_time, std::int64_t step, std::span<const Scalar> scalars);

// A new file in a folder, "events.out.tfevents.SECONDS.HOST.PROCESS"; each event is out of the process when the call
// returns. Throws IoError.
class EventFile {
 public:
  // first_step: the first that will be written.
  EventFile(const std::filesystem::path& folder, std::int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  void write(std::int64_t step, std::span<const Scalar> scalars);

 private:
  void append(const std::string& event);

  std::string path_;
  int descriptor_ = -1;
};

}  // namespace efla::io
