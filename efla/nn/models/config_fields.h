// Fields that the config.json of models of any kind may have.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "efla/io/fields.h"

namespace efla::nn {

// Reads the field eos_token_id, a token, a list of tokens, or null for none. Leaves `ids` as they are without the
// field.
void read_eos_token_id(const io::Fields& fields, std::vector<std::int64_t>& ids);

// Refuses a field that has another value than null and `values`, the supported ones.
void allow_values(const io::Fields& fields, const char* name, const std::vector<nlohmann::json>& values);

// Takes note of the fields that transformers, 4 and 5, and flash-linear-attention write for every model. Refuses those
// that have an unsupported value and would change what a model computes.
void read_other_fields(const io::Fields& fields);

}  // namespace efla::nn
