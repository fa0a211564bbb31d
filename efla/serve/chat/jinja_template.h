// Chat templates in Jinja, as models' folders have them for transformers.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "efla/serve/chat/chat_template.h"
#include "efla/serve/chat/template_worker.h"

namespace efla::serve {

struct JinjaSource {
  std::string file;  // for messages
  // By name. "tool_use", where there is one, renders requests with tools, "default" all others.
  std::map<std::string, std::string> templates;
  std::map<std::string, std::string> variables = {};  // such as bos_token, by name
};

// Returns the template of a model: in a GGUF file, or in a folder's chat_template.jinja, otherwise in its
// tokenizer_config.json. Nothing where the model has none. Throws IoError(content) for templates without one named
// "default".
std::optional<JinjaSource> find_jinja_template(const std::filesystem::path& model);

// Returns the template in a file, with the variables of a model's tokenizer.
JinjaSource read_jinja_template(const std::filesystem::path& file, const std::filesystem::path& model);

// Returns a template that a process renders (template_worker.h); nullptr where Python or jinja2 is missing. special:
// the texts of special tokens. Throws IoError(content) where jinja2 does not take the template.
std::shared_ptr<const ChatTemplate> make_jinja_template(JinjaSource source, const std::vector<std::string>& special,
                                                        const WorkerLimits& limits = {});

}  // namespace efla::serve
