// A text in the making: what a model keeps of it, and what sampling and writing need to go on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "efla/generate/sampler.h"
#include "efla/nn/models/language_model.h"

namespace efla::generate {

// Bytes of an unfinished character, which are three at most, come from this many ids at most.
inline constexpr std::size_t kLastIds = 3;

struct Session {
  nn::LanguageModelState state;        // after every id of the text but those pending
  std::vector<std::int64_t> pending;   // ids that the state has not taken in: the one drawn last, or a prompt's
  SeenIds seen;                        // of the prompts and the replies
  std::uint64_t seed = 0, draws = 0;   // of the ids drawn so far
  std::vector<std::int32_t> last_ids;  // the last kLastIds that stand for bytes
  std::string held;                    // text that may begin a stop string, or not, by what comes next

  // An empty text.
  Session(const nn::LanguageModel& model, std::uint64_t seed);

  bool empty() const { return state.tokens == 0 && pending.empty(); }
  // A session of its own with the same text.
  Session clone() const;
};

// SHA-256 of a model's configuration and weights.
std::string fingerprint(const nn::LanguageModel& model);

// One safetensors file (docs/generation.md). Its size is that of the state and vocab_size / 8 bytes, but for layers of
// softmax attention, whose keys and values grow with the text. Returns the file's size in bytes. Throws IoError; the
// file is whole or as before.
std::uint64_t save_session(const std::filesystem::path& path, const Session& session, const nn::LanguageModel& model);

// A session saved with the same model. Throws Error where it is of another, IoError(content) for another file.
Session load_session(const std::filesystem::path& path, const nn::LanguageModel& model);

}  // namespace efla::generate
