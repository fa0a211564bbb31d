#include "cli/serve/session_folder.h"

#include <fmt/core.h>

#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/io/file.h"

namespace efla::cli {
namespace {

constexpr const char* kEnd = ".safetensors";

std::vector<std::filesystem::path> files_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == kEnd && !io::is_temporary_name(entry.path().filename().string())) {
      files.push_back(entry.path());
    }
  }
  return files;
}

}  // namespace

SessionFolder::SessionFolder(std::filesystem::path path)
    : path_(std::move(path)), lock_(io::lock_folder(path_, "serve", "--sessions")) {}

void SessionFolder::load(serve::Engine& engine) {
  for (const auto& file : files_of(path_)) {
    const auto bytes = io::read_file(file);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    try {
      engine.load(file.stem().string(), text);
      loaded_.push_back(file.stem().string());
    } catch (const Error& error) {
      throw Error("serve", "--sessions", file.string() + " (" + error.what() + ")", "a session of this model");
    } catch (const IoError& error) {
      throw IoError(error.kind(), file.string(), error.offset(), error.what());
    }
  }
}

std::size_t SessionFolder::save(const serve::Engine& engine) const {
  std::size_t saved = 0;
  std::string failed;
  for (const auto& session : engine.sessions()) {
    if (session.name.starts_with('_')) continue;  // of a request that did not end
    try {
      io::write_file_atomically(path_ / (session.name + kEnd), engine.save(session.name));
      ++saved;
    } catch (const std::exception& error) {
      failed += (failed.empty() ? "" : "; ") + session.name + " (" + error.what() + ")";
    }
  }
  for (const auto& name : loaded_) {
    try {
      engine.session(name);
    } catch (const serve::NoSuchSession&) {
      std::filesystem::remove(path_ / (name + kEnd));
    }
  }
  if (!failed.empty()) {
    throw std::runtime_error(
        fmt::format("serve: --sessions: saved {} sessions in {}, but not {}", saved, path_.string(), failed));
  }
  return saved;
}

}  // namespace efla::cli
