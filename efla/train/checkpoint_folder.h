// A run's folder of checkpoints: checkpoints/step-000100, step-000200, …, each of them whole or not there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

namespace efla::train {

class CheckpointFolder {
 public:
  struct Saved {
    std::int64_t step = 0;
    std::filesystem::path path;
  };

  // Of a run's folder; made with the first checkpoint.
  explicit CheckpointFolder(const std::filesystem::path& run) : folder_(run / "checkpoints") {}

  std::filesystem::path path_of(std::int64_t step) const;

  // By rising step.
  std::vector<Saved> list() const;
  std::optional<Saved> latest() const;

  // write(folder) fills a folder under a temporary name, which then gets its own. What write throws, and IoError, leave
  // the other checkpoints as they were. One of the same step is replaced.
  void add(std::int64_t step, const std::function<void(const std::filesystem::path&)>& write);

  // Removes all but the newest so many.
  void keep_newest(std::int64_t count);

  // Removes what processes that were killed left behind. Nobody else may be writing.
  void remove_leftovers();

 private:
  void remove(const std::filesystem::path& checkpoint);

  std::filesystem::path folder_;
};

}  // namespace efla::train
