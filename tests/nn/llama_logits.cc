// Writes the logits that llama.cpp computes for tokens, for tests/nn/llama_logits.py. Not a part of the build, because
// it needs llama.cpp's library:
//
//   c++ -std=c++20 -O2 -I LLAMA/include -I LLAMA/ggml/include tests/nn/llama_logits.cc -o llama_logits LIBRARIES
#include <llama.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

// llama_logits MODEL.gguf IDS OUT: IDS has numbers of tokens as text, OUT gets logits [T, vocabulary] in float32.
int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::ifstream ids_file(argv[2]);
  std::vector<llama_token> ids(std::istream_iterator<llama_token>(ids_file), {});
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_model* const model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  const auto count = static_cast<std::uint32_t>(ids.size());
  auto options = llama_context_default_params();
  options.n_ctx = options.n_batch = options.n_ubatch = count;
  options.type_k = options.type_v = GGML_TYPE_F32;
  options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* const context = llama_init_from_model(model, options);
  if (context == nullptr) return 1;
  llama_batch batch = llama_batch_init(static_cast<std::int32_t>(count), 0, 1);
  batch.n_tokens = static_cast<std::int32_t>(count);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    batch.token[i] = ids[i];
    batch.pos[i] = static_cast<llama_pos>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  if (llama_decode(context, batch) != 0) return 1;
  const auto vocabulary = static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  std::ofstream out(argv[3], std::ios::binary);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    out.write(reinterpret_cast<const char*>(llama_get_logits_ith(context, static_cast<std::int32_t>(i))),
              static_cast<std::streamsize>(vocabulary * sizeof(float)));
  }
  return out.flush() ? 0 : 1;
}
