#include "efla/train/metrics_log.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "efla/io/content_error.h"
#include "efla/io/fields.h"

namespace efla::train {
namespace {

std::filesystem::path tensorboard_folder(const std::filesystem::path& folder) {
  const auto path = folder / "tensorboard";
  std::filesystem::create_directories(path);
  return path;
}

// Returns the numbers of a line that TensorBoard draws.
std::vector<io::Scalar> scalars_of(const nlohmann::ordered_json& line, const std::string& group) {
  std::vector<io::Scalar> scalars;
  for (const auto& [name, value] : line.items()) {
    if (value.is_number_float()) scalars.push_back({group + "/" + name, static_cast<float>(value.get<double>())});
  }
  return scalars;
}

}  // namespace

MetricsLog::MetricsLog(const std::filesystem::path& folder, std::int64_t step)
    : writer_(kept(folder / kMetricsFile, step)), events_(tensorboard_folder(folder), step + 1) {}

std::optional<nlohmann::ordered_json> MetricsLog::last(const std::string& event) const {
  const auto found = last_.find(event);
  return found == last_.end() ? std::nullopt : std::optional(found->second);
}

void MetricsLog::write(nlohmann::ordered_json line, const std::string& group, double seconds) {
  const auto scalars = scalars_of(line, group);
  line["seconds"] = seconds_ + seconds;
  writer_.write(line);
  if (!scalars.empty()) events_.write(line.at("step").get<std::int64_t>(), scalars);
  note(line);
}

void MetricsLog::note(const nlohmann::ordered_json& line) {
  seconds_ = line.at("seconds").get<double>();
  last_[line.at("event").get<std::string>()] = line;
}

const std::filesystem::path& MetricsLog::kept(const std::filesystem::path& path, std::int64_t step) {
  if (!std::filesystem::exists(path)) return path;
  std::size_t kept_lines = 0;
  std::int64_t reached = 0;
  for (const auto& line : io::read_json_lines(path)) {
    const auto place = "line " + std::to_string(kept_lines + 1) + ": ";
    const io::Fields fields(line, io::refuse_in_file(path.string(), place));
    const auto at = fields.get<std::int64_t>("step");
    if (at > step) break;
    reached = at;
    fields.get<double>("seconds");
    fields.get<std::string>("event");
    note(line);
    ++kept_lines;
  }
  if (kept_lines > 0 && reached < step) {
    io::fail_in(path.string(), "ends at step " + std::to_string(reached) + ", expected the step of the checkpoint, " +
                                   std::to_string(step) +
                                   "; restore the file, or remove it to resume without its lines");
  }
  const io::Bytes text = io::read_file(path);
  auto end = text.begin();
  while (kept_lines-- > 0) end = std::find(end, text.end(), '\n') + 1;
  io::write_file_atomically(path, io::ByteView(text.begin(), end));
  return path;
}

}  // namespace efla::train
