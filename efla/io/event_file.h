// TensorBoard's event files, for scalars over steps. TFRecord framing (tensorflow/core/lib/io/record_writer.h) around
// protobuf messages Event (tensorflow/core/util/event.proto), of which only the fields for scalars are written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "efla/io/file.h"

namespace efla::io {

// Returns a record: its length, the length's checksum, the data, the data's checksum. A checksum is masked: it is
// rotated right by 15 bits, then 0xa282ead8 is added.
std::string tf_record(std::string_view data);

struct Scalar {
  std::string tag;
  float value = 0.0F;
};

// Return messages of type Event. wall_time is in seconds since 1970.
std::string version_event(double wall_time);
// Returns a message that restarts the count at `step`: readers drop earlier values of `step` and of later steps.
std::string start_event(double wall_time, std::int64_t step);
std::string scalars_event(double wall_time, std::int64_t step, std::span<const Scalar> scalars);

// A new file in a folder, "events.out.tfevents.SECONDS.HOST.PROCESS". Each call writes its event before it returns.
// Throws IoError.
class EventFile {
 public:
  // first_step is the first step that will be written.
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
