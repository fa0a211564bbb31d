// The tensors of a model's layers, read from its folder by the description of its family, for the models on the CPU and
// on a GPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "efla/nn/families/family_config.h"
#include "efla/nn/families/family_weights.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/inference/rows.h"
#include "efla/nn/inference/text_run.h"

namespace efla::nn {

// Of a delta layer. `in` has the projections of MixerPlan in their order, some of them in one matrix.
struct MixerTensors {
  std::vector<StoredMatrix> in;
  StoredMatrix out;
  Vector taps, o_norm, a_log, dt_bias;
};

// Of an attention layer. `in`: of q, which may have gates, k and v. The norms are of a head, or of all heads.
struct AttentionTensors {
  std::vector<StoredMatrix> in;
  StoredMatrix out;
  Vector q_norm, k_norm;
};

// Of an MLP: `gate_up` has the matrices of gate and up, one below the other or apart.
struct MlpTensors {
  std::vector<StoredMatrix> gate_up;
  StoredMatrix down;
};

// Of a mixture of experts.
struct ExpertTensors {
  StoredMatrix router;       // [E, D]
  StoredMatrix shared_gate;  // [1, D]
  MlpTensors shared;
  std::vector<MlpTensors> experts;
};

struct LayerTensors {
  bool attends = false;
  Vector before_mixer, after_mixer, before_mlp, after_mlp;  // norms; empty: none
  MixerTensors mixer;                                       // of a layer that does not attend
  AttentionTensors attention;                               // of one that attends
  MlpTensors mlp;                                           // of a layer without experts
  std::optional<ExpertTensors> experts = {};
};

// Of a head for drafts (draft_head.h): fc is [D, 2·D], and the layer attends.
struct DraftHeadTensors {
  Vector embedding_norm, hidden_norm, norm;
  StoredMatrix fc;
  LayerTensors layer;
};

// Functions throw IoError as FamilyWeights does. All norms multiply by their weights: 1 is added to those that the
// folder keeps zero-centred.
class FamilyTensors {
 public:
  // config: of the folder.
  FamilyTensors(const std::filesystem::path& folder, const FamilyConfig& config);

  Vector norm();  // before the head
  // Returns whether the head has the weight of the embeddings. As in transformers, it does not where the folder has a
  // weight for each, whatever the configuration says.
  bool tied() const { return config_.tied; }
  StoredMatrix embeddings();  // a tied model's may have the name of the head
  StoredMatrix head();        // of a model that is not tied
  // plan: of the model's mixers.
  LayerTensors layer(std::int64_t index, const MixerPlan& plan);
  // Returns the head for drafts. Throws Error where the folder has none.
  DraftHeadTensors draft_head();
  bool has_draft_head() const { return files_.has_draft_head(); }

  // Return what FamilyWeights says of the tensors that were read.
  std::int64_t elements_read() const { return files_.elements_read(); }
  std::int64_t check_all_read() const { return files_.check_all_read(); }
  // Returns the SHA-256 of configuration and tensors.
  std::string fingerprint() const;

 private:
  Vector norm(const std::string& prefix, const Names& names, std::int64_t size);
  LayerTensors layer(const std::string& prefix, bool attends, bool sparse, const MixerPlan* plan);
  MixerTensors mixer(const std::string& prefix, const MixerPlan& plan);
  std::vector<StoredMatrix> unpacked(const std::string& prefix, const MixerPlan& plan);
  AttentionTensors attention(const std::string& prefix);
  MlpTensors mlp(const std::string& prefix, std::int64_t inner);
  ExpertTensors experts(const std::string& prefix);

  FamilyConfig config_;
  FamilyWeights files_;
  std::string config_text_;
};

// Returns the parts of TextState::constant: the memory and the last inputs of each delta layer.
std::vector<StatePart> family_state_parts(const FamilyConfig& config, const MixerPlan& plan);

}  // namespace efla::nn
