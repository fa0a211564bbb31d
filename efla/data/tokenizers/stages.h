// The stages that a tokenizer.json lists for its normalizer, its pre_tokenizer and its decoder.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/io/fields.h"

namespace efla::data {

// Throws IoError(content): a tokenizer.json with `what`, which is not supported.
[[noreturn]] void refuse_tokenizer(const std::string& path, const std::string& what);

// Returns the fields of the stages of a Sequence, which are in its field `list`, or of the one stage; none for null.
// what: the key of `stage`; path: both for messages. `stage` must outlive the result.
std::vector<io::Fields> stages_of(const nlohmann::json& stage, const char* what, const char* list,
                                  const std::string& path);

}  // namespace efla::data
