// A text in progress: the model's state, and what sampling and decoding need in order to continue.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "efla/generate/sampler.h"
#include "efla/generate/session_record.h"
#include "efla/nn/models/language_model.h"

namespace efla::generate {

struct Session {
  nn::LanguageModelState state;        // after all ids of the text except the pending ones
  std::vector<std::int64_t> pending;   // ids that the state has not seen: the last one drawn, or a prompt
  SeenIds seen;                        // of the prompts and the replies
  std::uint64_t seed = 0, draws = 0;   // seed, and number of ids drawn so far
  std::vector<std::int32_t> last_ids;  // the last kLastIds ids that stand for bytes
  std::string held;                    // text that may be the start of a stop string

  // Starts an empty text.
  Session(const nn::LanguageModel& model, std::uint64_t seed);

  bool empty() const { return state.tokens == 0 && pending.empty(); }
  // Returns an independent session with the same text.
  Session clone() const;
};

// Returns the SHA-256 of a model's configuration and weights.
std::string fingerprint(const nn::LanguageModel& model);

// Saves a session as one safetensors file (docs/generation.md). The file has about the size of the state plus
// vocab_size / 8 bytes. It grows with the text only if the model has layers of softmax attention, which keep keys and
// values. Returns the size of the file in bytes. Throws IoError, with kind content for a state that is not finite; the
// file is then unchanged.
std::uint64_t save_session(const std::filesystem::path& path, const Session& session, const nn::LanguageModel& model);

// Loads a session. Throws Error if another model saved it, IoError(content) for a file that is not a session.
Session load_session(const std::filesystem::path& path, const nn::LanguageModel& model);

}  // namespace efla::generate
