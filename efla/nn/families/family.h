// Families of hybrid models as Hugging Face's transformers saves them: layers of the delta rule, and layers of softmax
// attention between them. A family is a description, which the readers of the configuration (family_config.h) and of
// the weights (family_weights.h) follow; the model (family_model.h) knows no family. docs/extending.md says how to add
// a family.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace efla::nn {

// The names of a tensor, or beginnings of names, in the order in which they are tried.
using Names = std::vector<std::string_view>;

// A weight in the folder that has the rows of one or more projections of a mixer's input, one below the other.
struct ProjectionRows {
  std::string_view name;
  int projections = 1;
};

// A weight whose rows are grouped by key head: of each head the rows of all its parts, one below the other.
struct PackedRows {
  std::string_view name;
  std::string_view parts;  // of q, k, v, z, b and a
};

// The names of a layer's norms, without ".weight". No names: the layer has no norm at this place.
struct NormNames {
  Names before_mixer = {}, after_mixer = {};  // of the input of the mixer or the attention, and of its output
  Names before_mlp = {}, after_mlp = {};
};

struct Family {
  std::string_view model_type;      // of config.json
  std::string_view text_type = {};  // model_type of the field text_config, which has the text model; empty: none
  std::string_view lacks = {};      // layers that efla does not have: its models are refused

  // Tensors.
  Names prefixes;          // of the text model's tensors
  Names skipped = {};      // beginnings of the names of tensors that are not part of the text model
  Names draft_heads = {};  // beginnings of the names of a head for drafts (draft_head.h), which a folder may lack
  NormNames delta_norms, attention_norms;
  std::vector<ProjectionRows> projections;  // of a delta layer, in the order of MixerPlan::projections
  std::vector<PackedRows> packed = {};      // instead of projections
  Names convolutions;                       // of a delta layer; all of them form the taps of q, k and v
  std::string_view output_norm, output;     // of a delta layer

  // What the layers compute.
  bool zero_centred_norms = false;             // norms multiply by 1 + weight, except a delta layer's output norm
  std::optional<double> output_norm_eps = {};  // of a delta layer's output norm; none: rms_norm_eps
  bool gated_attention = false;  // q_proj has per head the rows of the query and of a gate of the head's output
  bool norm_per_head = true;     // of queries and keys; otherwise of all heads together
  bool has_experts = false;      // layers may have a mixture of experts (experts.h) instead of an MLP

  // The configuration.
  bool derives_sizes = false;          // sizes of heads may be absent
  bool may_lack_positions = false;     // without rope_theta there is no rotation; otherwise rope_theta is required
  double partial_rotary_factor = 1.0;  // if absent
};

// Returns every family, in the order of the documentation.
std::span<const Family> families();

// Returns the family with a model_type, as a top level or as a text part; null if there is none.
const Family* find_family(std::string_view model_type);

}  // namespace efla::nn
