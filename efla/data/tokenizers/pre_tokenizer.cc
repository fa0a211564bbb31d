#include "efla/data/tokenizers/pre_tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <oniguruma.h>
#include <utf8proc.h>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/stages.h"
#include "efla/io/content_error.h"

namespace efla::data {
namespace {

using nlohmann::json;

// The expression that ByteLevel splits by, which is GPT-2's.
constexpr const char* kByteLevel = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

// A regular expression in the syntax of Oniguruma, the library that Hugging Face's tokenizers use.
class PreTokenizer::Pattern {
 public:
  Pattern(std::string_view expression, bool keep_gaps, const std::string& path) : keep_gaps_(keep_gaps) {
    const auto* begin = reinterpret_cast<const OnigUChar*>(expression.data());
    OnigErrorInfo info;
    const int code = onig_new(&regex_, begin, begin + expression.size(), ONIG_OPTION_NONE, ONIG_ENCODING_UTF8,
                              ONIG_SYNTAX_DEFAULT, &info);
    if (code == ONIG_NORMAL) return;
    std::array<OnigUChar, ONIG_MAX_ERROR_MESSAGE_LEN> message{};
    const int size = onig_error_code_to_str(message.data(), code, &info);
    io::fail_in(path, fmt::format("the regular expression {}: {}", io::brief(expression),
                                  std::string_view(reinterpret_cast<const char*>(message.data()),
                                                   static_cast<std::size_t>(std::max(size, 0)))));
  }
  ~Pattern() { onig_free(regex_); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  // Calls f with every match and, with keep_gaps, with the text between matches.
  template <class F>
  void split(std::string_view text, const F& f) const {
    const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(onig_region_new(),
                                                                    [](OnigRegion* r) { onig_region_free(r, 1); });
    const auto* const begin = reinterpret_cast<const OnigUChar*>(text.data());
    const auto* const end = begin + text.size();
    std::size_t done = 0;  // end of the text that f has got or that was left out
    const auto pass = [&](std::size_t to, bool wanted) {
      if (wanted && to > done) f(text.substr(done, to - done));
      done = to;
    };
    for (std::size_t from = 0; from < text.size();) {
      const int at = onig_search(regex_, begin, end, begin + from, end, region.get(), ONIG_OPTION_NONE);
      if (at == ONIG_MISMATCH) break;
      if (at < 0) throw std::runtime_error(fmt::format("Oniguruma failed with code {}", at));
      const auto match_end = static_cast<std::size_t>(region->end[0]);
      pass(static_cast<std::size_t>(at), keep_gaps_);
      pass(match_end, true);
      from = match_end;
      if (static_cast<std::size_t>(at) == match_end) {  // an empty match
        if (from == text.size()) break;
        from += static_cast<std::size_t>(utf8_character(text.substr(from)));
      }
    }
    pass(text.size(), keep_gaps_);
  }

 private:
  OnigRegex regex_ = nullptr;
  bool keep_gaps_;
};

PreTokenizer::PreTokenizer(const json& normalizer, const json& pre_tokenizer, const std::string& path) {
  for (const auto& stage : stages_of(normalizer, "normalizer", "normalizers", path)) add_normalizer(stage, path);
  const auto stages = stages_of(pre_tokenizer, "pre_tokenizer", "pretokenizers", path);
  if (stages.empty() || stages.back().get<std::string>("type") != "ByteLevel") {
    refuse_tokenizer(path, "a pre_tokenizer that does not end in ByteLevel");
  }
  for (std::size_t i = 0; i < stages.size(); ++i) add_step(stages[i], i + 1 == stages.size(), path);
}
PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;

void PreTokenizer::add_normalizer(const io::Fields& normalizer, const std::string& path) {
  static constexpr std::array<std::pair<std::string_view, int>, 4> kForms{
      {{"NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE},
       {"NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
       {"NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
       {"NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}}};
  const auto type = normalizer.get<std::string>("type");
  const auto* const form =
      std::find_if(kForms.begin(), kForms.end(), [&](const auto& known) { return known.first == type; });
  if (form == kForms.end()) refuse_tokenizer(path, "the normalizer " + io::brief(type));
  forms_.push_back(form->second);
}

void PreTokenizer::add_step(const io::Fields& fields, bool last, const std::string& path) {
  const auto type = fields.get<std::string>("type");
  const auto flag = [&](const char* name, bool otherwise) { return fields.find<bool>(name).value_or(otherwise); };
  const auto add = [&](std::string_view expression, bool keep_gaps) {
    patterns_.push_back(std::make_unique<Pattern>(expression, keep_gaps, path));
    borders_.emplace_back(expression);
  };
  if (type == "ByteLevel") {
    if (!last) refuse_tokenizer(path, "a pre_tokenizer with a step after ByteLevel");
    if (flag("add_prefix_space", true)) refuse_tokenizer(path, "add_prefix_space");
    if (flag("use_regex", true)) add(kByteLevel, true);
  } else if (type == "Digits") {
    add(flag("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", true);
  } else if (type == "Split") {
    const bool has_pattern = fields.find("pattern") != nullptr;
    const auto expression = has_pattern ? fields.object("pattern").find<std::string>("Regex") : std::nullopt;
    const auto behavior = fields.find<std::string>("behavior").value_or("");
    const bool inverted = flag("invert", false);
    if (!expression) refuse_tokenizer(path, "a Split without a regular expression");
    if ((behavior != "Isolated" || inverted) && (behavior != "Removed" || !inverted)) {
      refuse_tokenizer(path,
                       fmt::format("a Split of the behavior {}{}", io::brief(behavior), inverted ? ", inverted" : ""));
    }
    add(*expression, behavior == "Isolated");
  } else {
    refuse_tokenizer(path, "the pre_tokenizer " + io::brief(type));
  }
}

std::string PreTokenizer::normalized(std::string_view text) const {
  std::string result(text);
  for (const int form : forms_) {
    utf8proc_uint8_t* mapped = nullptr;
    const auto size =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(result.data()),
                     static_cast<utf8proc_ssize_t>(result.size()), &mapped, static_cast<utf8proc_option_t>(form));
    if (size < 0) throw std::runtime_error(std::string("utf8proc: ") + utf8proc_errmsg(size));
    const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owned(mapped, std::free);
    result.assign(reinterpret_cast<const char*>(mapped), static_cast<std::size_t>(size));
  }
  return result;
}

void PreTokenizer::split(std::string_view text, const std::function<void(std::string_view)>& f) const {
  if (!text.empty()) split_from(0, text, f);
}

void PreTokenizer::split_from(std::size_t step, std::string_view text,
                              const std::function<void(std::string_view)>& f) const {
  if (step == patterns_.size()) return f(text);
  patterns_[step]->split(text, [&](std::string_view piece) { split_from(step + 1, piece, f); });
}

}  // namespace efla::data
