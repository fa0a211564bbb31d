#include "efla/engine/session_format.h"

#include <algorithm>
#include <map>
#include <utility>

#include "efla/io/content_error.h"
#include "efla/io/safetensors/safetensors.h"

namespace efla::engine {
namespace {

constexpr const char* kDisposable = "disposable";  // key in the metadata of disposable sessions

std::string page_name(std::size_t page) { return "pages." + std::to_string(page); }

io::TensorType page_type(const StateLayout& layout) {
  return layout.page_type == nn::KeyValueType::float32 ? io::TensorType::F32 : io::TensorType::BF16;
}

std::vector<std::int64_t> page_shape(const StateLayout& layout) {
  return {static_cast<std::int64_t>(layout.page_bytes / io::type_bytes(page_type(layout)))};
}

}  // namespace

// Returns the tensors of a file that have the state, whose memory they share, without the first pages.
std::vector<io::NamedTensor> SessionFormat::tensors(const nn::TextState& state, std::size_t first_page) const {
  std::vector<io::NamedTensor> tensors;
  const auto layout = layout_(state.tokens);
  for (const auto& part : layout.parts) {
    const auto* floats = reinterpret_cast<const std::uint8_t*>(state.constant->data() + part.offset);
    tensors.push_back({part.name, io::TensorType::F32, part.shape, {floats, part.floats * sizeof(float)}});
  }
  for (std::size_t i = first_page; i < state.pages.size(); ++i) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(state.pages[i]->data());
    tensors.push_back({page_name(i), page_type(layout), page_shape(layout), {bytes, layout.page_bytes}});
  }
  return tensors;
}

void SessionFormat::check(const SessionRecord& record, const nn::TextState& state, std::size_t checked) const {
  check_session(record, tensors(state, checked), "session", model_);
}

std::string SessionFormat::bytes(const StoredText& text, bool disposable) const {
  nn::TextState state{0, std::make_shared<std::vector<float>>(layout_(0).constant_bytes() / sizeof(float))};
  if (text.state) state = text.state->get();
  auto all = tensors(state, 0);
  text.record.append_to(all);
  auto metadata = session_metadata(text.record, model_);
  if (disposable) metadata[kDisposable] = "true";
  return io::safetensors_bytes(all, metadata);
}

SessionFormat::Session SessionFormat::read(std::string_view bytes, const std::string& path,
                                           const std::shared_ptr<StoredPages>& pages) const {
  const auto content = io::parse_safetensors(io::as_bytes(bytes), path);
  auto text = std::make_shared<StoredText>();
  text->record = read_session_record(content.tensors, content.metadata, path, model_);
  std::map<std::string_view, const io::NamedTensor*> tensors;
  for (const auto& tensor : content.tensors) tensors[tensor.name] = &tensor;
  const auto find = [&](const std::string& part, io::TensorType type, const std::vector<std::int64_t>& shape) {
    const auto tensor = tensors.find(part);
    if (tensor == tensors.end() || tensor->second->type != type || tensor->second->shape != shape) {
      io::fail_in(path, "not a session: " + part + " is missing or of another type or shape");
    }
    return tensor->second->bytes;
  };
  const auto layout = layout_(text->state_tokens());
  for (const auto& part : layout.parts) find(part.name, io::TensorType::F32, part.shape);
  const auto page = [&](std::size_t i) { return find(page_name(i), page_type(layout), page_shape(layout)); };
  for (std::size_t i = 0; std::cmp_less(i, layout.pages); ++i) page(i);
  // All are there, so that the file is as large as the memory for the number of tokens that it says.
  std::vector<float> constant(layout.constant_bytes() / sizeof(float));
  for (const auto& part : layout.parts) {
    std::ranges::copy(tensors.at(part.name)->bytes, reinterpret_cast<std::uint8_t*>(constant.data() + part.offset));
  }
  nn::TextState state{text->state_tokens(), std::make_shared<std::vector<float>>(std::move(constant))};
  for (std::size_t i = 0; std::cmp_less(i, layout.pages); ++i) state.pages.push_back(pages->load(page(i)));
  text->state = std::make_shared<StoredState>(state, pages);
  return {std::move(text), content.metadata.contains(kDisposable)};
}

}  // namespace efla::engine
