#include "efla/io/checkpoint_folder.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "efla/io/safetensors/safetensors_folder.h"

namespace efla::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step;
}

bool is_complete(const fs::path& checkpoint) {
  std::error_code error;
  return fs::exists(checkpoint / kWeightsFile, error) && fs::exists(checkpoint / kTrainerFile, error);
}

[[noreturn]] void refuse(const fs::path& path, const std::string& what, const std::error_code& error) {
  throw IoError(IoError::Kind::system, path.string(), -1, "cannot " + what + ": " + error.message());
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  if (!fs::exists(folder, error)) return paths;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    paths.push_back(entry->path());
  }
  if (error) refuse(folder, "look into the folder", error);
  return paths;
}

}  // namespace

fs::path CheckpointFolder::path_of(std::int64_t step) const {
  const std::string digits = std::to_string(step);
  return folder_ / (std::string(kPrefix) + std::string(6 - std::min<std::size_t>(digits.size(), 6), '0') + digits);
}

std::vector<CheckpointFolder::Saved> CheckpointFolder::named() const {
  std::vector<Saved> found;
  for (const auto& path : entries_of(folder_)) {
    if (const auto step = step_of(path.filename().string())) found.push_back({*step, path});
  }
  std::sort(found.begin(), found.end(), [](const Saved& a, const Saved& b) { return a.step < b.step; });
  return found;
}

std::vector<CheckpointFolder::Saved> CheckpointFolder::list() const {
  auto found = named();
  std::erase_if(found, [](const Saved& saved) { return !is_complete(saved.path); });
  return found;
}

std::vector<fs::path> CheckpointFolder::ignored() const {
  std::vector<fs::path> paths;
  for (const auto& [step, path] : named()) {
    if (!is_complete(path)) paths.push_back(path);
  }
  return paths;
}

std::optional<CheckpointFolder::Saved> CheckpointFolder::latest() const {
  const auto found = list();
  if (found.empty()) return std::nullopt;
  return found.back();
}

CheckpointFolder::Saved CheckpointFolder::require_latest() const {
  const auto found = latest();
  if (!found) throw IoError(IoError::Kind::missing, folder_.string(), -1, "has no checkpoint of a training run");
  return *found;
}

void CheckpointFolder::add(std::int64_t step, const std::function<void(const fs::path&)>& write) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) refuse(folder_, "make the folder", error);
  const fs::path target = path_of(step);
  AtomicFolder folder(target);
  write(folder.path());
  if (fs::exists(target)) remove(target);
  folder.commit();
}

void CheckpointFolder::keep_newest(std::int64_t count) {
  const auto found = list();
  const auto removed = static_cast<std::int64_t>(found.size()) - count;
  for (std::int64_t i = 0; i < removed; ++i) remove(found[i].path);
}

void CheckpointFolder::remove_leftovers() {
  for (const auto& path : entries_of(folder_)) {
    std::error_code error;
    const std::string name = path.filename().string();
    if (name.starts_with('.') && name.substr(1).starts_with(kPrefix)) fs::remove_all(path, error);
    if (error) refuse(path, "remove it", error);
  }
}

// Renames the folder to a hidden name first, so that a kill leaves no half of a checkpoint under its name.
void CheckpointFolder::remove(const fs::path& checkpoint) {
  fs::path hidden = checkpoint.parent_path() / ".";
  hidden += checkpoint.filename();
  hidden += ".removed";
  std::error_code error;
  fs::remove_all(hidden, error);
  fs::rename(checkpoint, hidden, error);
  if (error) refuse(checkpoint, "remove it", error);
  fs::remove_all(hidden, error);
  if (error) refuse(hidden, "remove it", error);
}

}  // namespace efla::io
