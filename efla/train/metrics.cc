#include "efla/train/metrics.h"

#include <algorithm>

#include "efla/base/error.h"

namespace efla::train {

Metrics::Metrics(const std::filesystem::path& path, std::int64_t step) : writer_(kept(path, step)) {}

std::int64_t Metrics::last_step(const std::string& event) const {
  const auto found = last_steps_.find(event);
  return found == last_steps_.end() ? 0 : found->second;
}

void Metrics::write(const nlohmann::ordered_json& line) {
  writer_.write(line);
  note(line);
}

void Metrics::note(const nlohmann::ordered_json& line) {
  seconds_ = line.at("seconds").get<double>();
  last_steps_[line.at("event").get<std::string>()] = line.at("step").get<std::int64_t>();
}

const std::filesystem::path& Metrics::kept(const std::filesystem::path& path, std::int64_t step) {
  if (!std::filesystem::exists(path)) return path;
  std::size_t kept_lines = 0;
  try {
    for (const auto& line : io::read_json_lines(path)) {
      if (line.at("step").get<std::int64_t>() > step) break;
      note(line);
      ++kept_lines;
    }
  } catch (const nlohmann::json::exception&) {
    throw IoError(IoError::Kind::content, path.string(), -1,
                  "line " + std::to_string(kept_lines + 1) + " has no event, step and seconds");
  }
  const io::Bytes text = io::read_file(path);
  auto end = text.begin();
  while (kept_lines-- > 0) end = std::find(end, text.end(), '\n') + 1;
  io::write_file_atomically(path, io::ByteView(text.begin(), end));
  return path;
}

}  // namespace efla::train
