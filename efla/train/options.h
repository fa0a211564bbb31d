// What decides a training run besides the model and the data.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "efla/train/schedule.h"

namespace efla::train {

struct TrainOptions {
  std::int64_t epochs = 5;
  double lr = 3e-3;
  std::uint64_t seed = 1;  // of the initial parameters and of the order of the images
  std::int64_t batch_size = 128;
  double weight_decay = 0.01;  // AdamW's, of the parameters that weight_decays says
  Schedule schedule = Schedule::cosine;
  double warmup = 0.05;  // the part of all steps over which the learning rate rises
  double clip = 1.0;     // largest gradient norm; 0 does not clip
};

// Throws Error, naming the option, where a value is out of range.
void validate(const TrainOptions& options);

std::string_view schedule_name(Schedule schedule);
// Throws Error for a name that is neither "constant" nor "cosine".
Schedule schedule_from_name(std::string_view name);

nlohmann::json to_json(const TrainOptions& options);
TrainOptions train_options_from_json(const nlohmann::json& json);

// A field (by its path, as in "model.hidden") and its values in two objects, as text; "nothing" where it is missing.
struct Difference {
  std::string field, asked, found;
};

// Returns the first field whose values differ; a field that only one of the objects has differs.
std::optional<Difference> first_difference(const nlohmann::json& asked, const nlohmann::json& found);

// Throws Error with the first difference. operation and where ("checkpoint RUN/checkpoint.safetensors") are for the
// message.
void require_same(const nlohmann::json& asked, const nlohmann::json& found, std::string_view operation,
                  std::string_view where);

}  // namespace efla::train
