// The checkpoints of a run: checkpoints/step-000100, step-000200, … in its folder. A checkpoint is complete or absent.
// A folder of such a name without model.safetensors or without trainer.json, which is written last, is no checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

namespace efla::io {

inline constexpr const char* kCheckpointsFolder = "checkpoints";  // of a run's folder
inline constexpr const char* kTrainerFile = "trainer.json";       // of a checkpoint

class CheckpointFolder {
 public:
  struct Saved {
    std::int64_t step = 0;
    std::filesystem::path path;
  };

  // `run` is the run's folder. The first checkpoint makes the folder of checkpoints.
  explicit CheckpointFolder(const std::filesystem::path& run) : folder_(run / kCheckpointsFolder) {}

  std::filesystem::path path_of(std::int64_t step) const;

  // Returns the checkpoints, by rising step.
  std::vector<Saved> list() const;
  std::optional<Saved> latest() const;
  // Returns the newest checkpoint. Throws IoError if there is none.
  Saved require_latest() const;
  // Returns the paths with the name of a checkpoint that are none, by rising step.
  std::vector<std::filesystem::path> ignored() const;

  // Calls write(folder), which writes model.safetensors and then trainer.json, with a folder under a temporary name,
  // then renames the folder. Replaces a checkpoint of the same step. If write throws, the other checkpoints stay as
  // they were. Throws IoError.
  void add(std::int64_t step, const std::function<void(const std::filesystem::path&)>& write);

  // Removes all but the newest `count` checkpoints.
  void keep_newest(std::int64_t count);

  // Removes the temporary folders of processes that were killed. No other process may be writing.
  void remove_leftovers();

 private:
  std::vector<Saved> named() const;  // as a checkpoint, by rising step
  void remove(const std::filesystem::path& checkpoint);

  std::filesystem::path folder_;
};

}  // namespace efla::io
