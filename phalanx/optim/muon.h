// Muon: momentum whose matrices are orthogonalised before each step, as torch.optim.Muon does it.
//
//   b    <- lerp(b, g, 1 - momentum)
//   u    <- newton_schulz(nesterov ? lerp(g, b, momentum) : b)       of the whole matrix, in bfloat16
//   p    <- p - lr * weight_decay * p
//   p    <- p - lr * adjustment(rows, columns) * u
//
// It is for matrices alone; what else there is takes another optimizer (optimizer_set.h). State per parameter:
// momentum_buffer (b), laid out over the ranks as the parameter.
//
// Where ranks hold parts of a matrix, one of them puts it together and orthogonalises it (matrix_exchange.h). So step()
// is collective over `comm`, and every rank must have a gradient, perhaps an empty one, of the same parameters. Given
// the same gradients every layout computes the same bits, for float32 on the CPU.
// See optimizer.h for the rest of the contract.
//
//   Muon muon(matrices, {.adjust_lr = MuonAdjustment::match_rms_adamw}, world.get());
#pragma once

#include <cstdint>
#include <string_view>

#include "phalanx/optim/matrix_exchange.h"
#include "phalanx/optim/newton_schulz.h"
#include "phalanx/optim/optimizer.h"

namespace phalanx {

enum class MuonAdjustment : std::uint8_t {
  original,         // sqrt(max(1, rows / columns)): Keller Jordan's
  match_rms_adamw,  // 0.2 * sqrt(max(rows, columns)): Moonshot's; rates and weight decays are those of AdamW
};
/// Accepts "original" or "match_rms_adamw". Any other name throws a ConfigError.
MuonAdjustment muon_adjustment_from(std::string_view name);

struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  NewtonSchulzOptions newton_schulz;
  MuonAdjustment adjust_lr = MuonAdjustment::original;
  double lr_factor = 1;  // multiplies the rate of every step
  double weight_decay = 0.1;
  std::vector<std::string> no_decay;   // patterns of names that do not decay; name_patterns.h
  std::vector<ParameterGroup> groups;  // with rates or weight decays of their own; parameter_groups.h
  bool master_weights = true;          // of 16-bit parameters; see optimizer.h
};

class Muon final : public Optimizer {
 public:
  /// `comm`: the ranks that hold parts of the matrices, or copies; null: this rank has everything, and computes it.
  /// Throws ConfigError for options out of range, Error for a parameter that is no matrix and as MatrixExchange does.
  /// REQUIRES: `comm` outlives this object.
  explicit Muon(std::vector<NamedTensor> parameters, MuonOptions options = {}, Communicator* comm = nullptr);
  void collect_state(TrainState& state) const override;
  /// The rank that orthogonalises a parameter.
  int owner_of(std::size_t parameter) const { return exchange_.owner_of(parameter); }

 private:
  void prepare(std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;
  void step_on_cpu(const std::vector<Target>& targets) override;
  void step_by_libtorch(const std::vector<Target>& targets, const std::optional<at::Tensor>& skip) override;
  at::Tensor add_to_momentum(const Target& target, const std::optional<at::Tensor>& skip);
  void add_to_momentum_on_cpu(std::vector<Target> targets, const std::vector<at::Tensor>& updates);
  double adjusted(const Target& target) const;

  MuonOptions options_;
  std::vector<at::Tensor> momentum_buffer_;
  MatrixExchange exchange_;
};

}  // namespace phalanx
