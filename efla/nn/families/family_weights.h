// The tensors of a model of a family in its folder or GGUF file, which stay mapped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "efla/nn/families/family.h"
#include "efla/nn/families/tensor_source.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"

namespace efla::nn {

// Functions throw IoError(content) for a tensor that is missing, or of another type or shape. Types are F32, BF16 and
// F16, in a GGUF file also quantised ones.
class FamilyWeights {
 public:
  // Throws IoError for files that are not safetensors, and where no prefix of the family fits: with none of them there
  // is a norm before the head.
  FamilyWeights(const std::filesystem::path& folder, const Family& family);

  // Returns where the tensors come from, which may live longer.
  std::shared_ptr<const TensorSource> share() const { return source_; }
  // Returns whether there is a tensor of the text model with this name.
  bool has(const std::string& name) const { return source_->has(full(name)); }
  // Returns whether there is a weight of the head.
  bool has_head() const { return source_->has(head_name()); }
  // Returns whether the folder was converted for MLX: its convolutions are [·, W, 1], and its zero-centred norms have 1
  // added already.
  bool for_mlx() const { return for_mlx_; }
  // Returns whether zero-centred norms have 1 added already.
  bool has_whole_norms() const { return for_mlx_ || source_->has_whole_norms(); }
  // Lets the functions above and below find the tensors of the head for drafts in place of the text model's, until
  // end_draft_head. Returns whether there is such a head.
  bool begin_draft_head();
  bool has_draft_head() const;
  void end_draft_head() { std::swap(prefix_, draft_head_); }
  // Returns the first of the names, behind `before`, with which there is a tensor, or the first of all.
  std::string first_of(const std::string& before, const Names& names, std::string_view after) const;

  // Returns a matrix, which shares the memory of its file unless its type is F16 or its address is not a multiple of
  // its elements' size.
  StoredMatrix matrix(const std::string& name, std::int64_t rows, std::int64_t columns);
  // Returns the matrices of a tensor [count, rows, columns] in the same way.
  std::vector<StoredMatrix> matrices(const std::string& name, std::int64_t count, std::int64_t rows,
                                     std::int64_t columns);
  // Returns the matrix lm_head.weight in the same way. The prefix of the text model's tensors is not a part of its
  // name.
  StoredMatrix head(std::int64_t rows, std::int64_t columns);
  // Returns the elements of a tensor in float32.
  Vector vector(const std::string& name, const std::vector<std::int64_t>& shape);
  // Returns the rows of tensors [·, 1, W] or [·, W], for MLX [·, W, 1], `channels` in all, one tensor below the other.
  Vector taps(const std::vector<std::string>& names, std::int64_t channels, std::int64_t width);

  // Returns the number of elements of the tensors that were read.
  std::int64_t elements_read() const;
  // Throws IoError(content) for a tensor that no function above has read and that is not skipped: by the family, unless
  // it begins as a head for drafts that was read. Returns the number of tensors that are skipped.
  std::int64_t check_all_read() const;

 private:
  static constexpr std::string_view kHead = "lm_head.weight";

  std::string head_name() const;
  bool find_form() const;
  std::string full(std::string_view name) const { return std::string(prefix_).append(name); }
  SourceTensor find(const std::string& full_name, bool matrix);
  StoredMatrix stored(const std::string& full_name, const std::vector<std::int64_t>& shape);

  std::shared_ptr<const TensorSource> source_;
  const Family& family_;
  std::string_view prefix_, draft_head_;  // beginnings of names; draft_head_: empty unless this head was read
  bool for_mlx_ = false;
  std::set<std::string, std::less<>> read_;
};

}  // namespace efla::nn
