// What is fuzzed: the readers of bytes that come from elsewhere. Each function reads its bytes and throws
// std::logic_error where the reader broke a promise; any other exception that escapes, and anything that a sanitizer
// sees, is a find too. libFuzzer calls them through entry.cc, and corpus_test.cc with every input kept in corpus/.
#pragma once

#include "efla/io/file.h"

namespace efla::fuzz {

void safetensors(io::ByteView bytes);
// A file of GGUF: its metadata, and where its tensors lie.
void gguf(io::ByteView bytes);
void gzip(io::ByteView bytes);
// Images and labels of MNIST's format, from memory.
void idx(io::ByteView bytes);
// A folder of MNIST with plain or packed files. The first two bytes, big-endian, are the size of the images' file; the
// labels' file is what follows it.
void images(io::ByteView bytes);
// A file of metrics, read and opened for appending.
void json_lines(io::ByteView bytes);
// A run of a language model, read for the report that compares runs: metrics.jsonl, whose first line is taken as
// run.json.
void lm_run(io::ByteView bytes);
// gzip, xz or zstd as streams.
void unpack(io::ByteView bytes);
// A shard of tokens, and the index of a folder of them.
void token_shard(io::ByteView bytes);
void token_index(io::ByteView bytes);
// A SentencePiece model, which then tokenizes a text.
void sentencepiece(io::ByteView bytes);
// A tokenizer.json, which then does the same.
void tokenizer_json(io::ByteView bytes);
// Text, and JSON lines, that may be packed.
void documents(io::ByteView bytes);
// The file of a benchmark of language models, which the first byte chooses.
void lm_tasks(io::ByteView bytes);
// What a client of the server sends, in pieces: bytes of a connection.
void http_requests(io::ByteView bytes);
// The JSON of a request to the server; the first byte chooses the endpoint.
void api_requests(io::ByteView bytes);
// The text of a model's reply; the first byte chooses how it writes calls of tools.
void replies(io::ByteView bytes);
// A JSON schema, a regular expression or a grammar that a client wants a reply to follow; the first byte says which.
void schemas(io::ByteView bytes);
// The record in the file of a session: a state that a client of the server sends, or a file of its folder.
void session(io::ByteView bytes);
// The config.json of a model of a family.
void family_config(io::ByteView bytes);
// The index of the weights of a model, beside two shards a.safetensors and b.safetensors.
void weights_index(io::ByteView bytes);
// A configuration.
void toml(io::ByteView bytes);

}  // namespace efla::fuzz
