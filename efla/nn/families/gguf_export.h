// Writes a model of a family as a GGUF file, as llama.cpp's converter does.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "efla/io/gguf/gguf_write.h"

namespace efla::nn {

struct GgufExported {
  std::int64_t parameters = 0, skipped_tensors = 0;
  std::string type;  // of the weights of linear layers
};

// Writes the model in a folder to `file`. type: of the weights of linear layers, F32, F16, BF16, Q8_0, or Q4_0, which
// only MLPs have, beside others in Q8_0; "": BF16 or F32, as the folder has them. Norms, convolutions, step sizes and
// decays are in float32; rows that are no whole blocks are in F16. metadata: more entries, such as those of the
// tokenizer. Throws IoError as FamilyModel does, and Error for another family than qwen3_5 and for another type.
GgufExported export_gguf(const std::filesystem::path& folder, const std::filesystem::path& file,
                         const std::string& type, const io::GgufEntries& metadata);

}  // namespace efla::nn
