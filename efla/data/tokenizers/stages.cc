#include "efla/data/tokenizers/stages.h"

#include "efla/io/content_error.h"

namespace efla::data {

void refuse_tokenizer(const std::string& path, const std::string& what) {
  io::fail_in(path, "a tokenizer with " + what + ", which is not supported");
}

std::vector<io::Fields> stages_of(const nlohmann::json& stage, const char* what, const char* list,
                                  const std::string& path) {
  if (stage.is_null()) return {};
  const io::Fields fields(stage, io::refuse_in_file(path), what);
  if (fields.get<std::string>("type") == "Sequence") return fields.objects(list);
  return {fields};
}

}  // namespace efla::data
