#include "phalanx/parallel/tensor/styles.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/name_patterns.h"
#include "phalanx/comm/data_type.h"
#include "phalanx/nn/attention.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/feed_forward.h"
#include "phalanx/nn/fused_linear.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/norm.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/parallel/tensor/coalesced_all_reduce.h"
#include "phalanx/parallel/tensor/functional_collectives.h"
#include "phalanx/parallel/tensor/overlapped_layers.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/narrow_to_box.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

constexpr const char* kTensorAxis = "tp";
constexpr const char *kAdapterA = "lora_A", *kAdapterB = "lora_B";  // of a Linear
constexpr const char* kNestedScales = "weight_nested";              // of a Linear in 4 bits: whole on every rank

bool has_adapter(const nn::Module& module) {
  const auto* linear = dynamic_cast<const nn::Linear*>(&module);
  return linear != nullptr && linear->has_adapter();
}

bool has_own_product(const nn::Module& module) {
  const auto* linear = dynamic_cast<const nn::Linear*>(&module);
  return linear != nullptr && linear->has_own_product();
}

// How one parameter is split; empty: it stays whole.
struct ParameterSplit {
  std::optional<int> dim;
  int copies = 1;
  bool operator==(const ParameterSplit&) const = default;
};

struct NamedModule {
  std::string name;
  torch::nn::Module* module;
};

std::vector<NamedModule> modules_of(torch::nn::Module& model) {
  std::vector<NamedModule> result{{"", &model}};
  for (const auto& m : model.named_modules("", /*include_self=*/false)) result.push_back({m.key(), m.value().get()});
  return result;
}

class Parallelizer {
 public:
  Parallelizer(torch::nn::Module& model, const DeviceMesh& mesh) : mesh_(mesh), modules_(modules_of(model)) {
    for (const auto& [name, tensor, init, shard] : nn::parameter_inits(model)) {
      if (shard) {
        throw ConfigError(fmt::format("parallelize_module: '{}' is split already ({}): one plan has to say it all",
                                      name, shard->spec.text()));
      }
      names_.emplace(tensor.unsafeGetTensorImpl(), name);
    }
  }

  // Checks everything, changes nothing.
  void read(const std::vector<ParallelStyle>& plan) {
    std::vector<std::string> names;
    for (const auto& m : modules_) names.push_back(m.name);
    for (const auto& [pattern, style] : plan) {
      const std::vector<bool> chosen = matching_names("parallelize_module: modules of the plan", {pattern}, names);
      for (std::size_t i = 0; i < modules_.size(); ++i) {
        if (!chosen[i]) continue;
        auto* module = dynamic_cast<nn::Module*>(modules_[i].module);
        if (module == nullptr) {
          throw ConfigError(
              fmt::format("parallelize_module: '{}' is a {}, which has no hooks: expected a phalanx::nn::Module",
                          modules_[i].name, modules_[i].module->name()));
        }
        std::visit([&](const auto& s) { take(modules_[i].name, *module, s); }, style);
      }
    }
    for (const auto& check : checks_) check();
    for (const auto& m : modules_) {
      for (const auto& p : m.module->named_parameters(/*recurse=*/false)) add_shard(*m.module, p.value());
    }
  }

  std::vector<std::shared_ptr<Communicator>> apply() {
    const at::NoGradGuard no_grad;
    for (const auto& [impl, shard] : shards_) {
      const at::Tensor& parameter = tensors_.at(impl);
      const Box box = shard->box();
      if (box == shard->spec.global_box()) continue;
      parameter.mutable_grad().reset();
      parameter.set_data(part_of(parameter, box));
    }
    for (const auto& m : modules_) {
      auto* ours = dynamic_cast<nn::Module*>(m.module);
      if (ours == nullptr) continue;
      ours->share_storage();
      for (const auto& p : ours->named_parameters(/*recurse=*/false)) {
        ours->set_shard(p.key(), shards_.at(p.value().unsafeGetTensorImpl()));
      }
    }
    if (mesh_.size(kTensorAxis) == 1) return {};
    const std::shared_ptr<Communicator>& group = mesh_.communicator(kTensorAxis);
    std::map<int, std::shared_ptr<Communicator>> groups_of_copies;
    for (const int copies : copies_) {
      groups_of_copies[copies] = group->split(group->rank() / copies, group->rank(), "tp_copy");
    }
    // The hook that is attached first to an output runs last.
    for (const auto& attach : prepare_outputs_) attach(group);
    for (const auto& attach : styles_) attach(group);
    for (const auto& attach : prepare_inputs_) attach(group);
    for (const auto& [place, parameters] : coalesced_) {
      const std::shared_ptr<Communicator>& ranks = place.copies == 0 ? group : groups_of_copies.at(place.copies);
      auto* const parent = dynamic_cast<nn::Module*>(find(place.parent));
      if (parent != nullptr && parameters.size() > 1) {
        coalesce_all_reduces(*parent, parameters, ranks);
        continue;
      }
      for (const auto& [module, parameter] : parameters) {
        module->set_parameter_use(parameter, [ranks](const at::Tensor& p) { return copy_to_group(p, ranks); });
      }
    }
    std::vector<std::shared_ptr<Communicator>> made;
    for (const auto& [copies, ranks] : groups_of_copies) made.push_back(ranks);
    return made;
  }

 private:
  using Attach = std::function<void(const std::shared_ptr<Communicator>& group)>;

  /// A set of gradients that one collective sums: those of one parent's modules, over the same ranks.
  struct CoalescingKey {
    std::string parent;
    int copies = 0;  // 0: over the whole group
    // NOLINTNEXTLINE(modernize-use-nullptr): takes the 0 that the generated comparison holds for a pointer
    auto operator<=>(const CoalescingKey&) const = default;
  };

  void sum_gradient(const std::string& name, nn::Module& module, const std::string& parameter, int copies) {
    // Not over the whole model: parameters used at its two ends may be gathered one after the other (FSDP units).
    const std::size_t dot = name.rfind('.');
    coalesced_[{name.substr(0, dot), copies}].push_back({&module, parameter});
  }

  torch::nn::Module* find(const std::string& name) const {
    const auto found = std::ranges::find(modules_, name, &NamedModule::name);
    return found == modules_.end() ? nullptr : found->module;
  }

  static std::string described(const std::string& name, const char* style) {
    return fmt::format("parallelize_module: '{}' ({})", name, style);
  }

  [[noreturn]] static void refuse(const std::string& what, const nn::Module& module, const char* expected) {
    throw ConfigError(fmt::format("{}: it is a {}; expected {}", what, module.name(), expected));
  }

  static Attach convert_input(nn::Module& module, const ActivationLayout& from, const ActivationLayout& to) {
    return [&module, from, to](const std::shared_ptr<Communicator>& group) {
      if (from == to) return;
      if (to != ActivationLayout::shared() || module.has_runner()) {
        module.add_input_hook([=](const at::Tensor& input) { return convert(input, from, to, group); });
        return;
      }
      // The layers inside leave their weight gradients in a queue for this pass. They are computed while the input's
      // gradient is in flight. Not if other code defers them: a pipeline schedule decides when they are computed.
      const auto of_this_pass = std::make_shared<std::shared_ptr<WeightGradientQueue>>();
      module.add_input_hook([=](const at::Tensor& input) {
        const bool defers =
            at::GradMode::is_enabled() && input.requires_grad() && !WeightGradientQueue::current().queue;
        *of_this_pass = defers ? std::make_shared<WeightGradientQueue>() : nullptr;
        return convert(input, from, to, group, *of_this_pass);
      });
      module.set_runner([=](const nn::Module::Forward& forward, const at::Tensor& input) {
        const auto queue = std::exchange(*of_this_pass, nullptr);
        if (!queue) return forward(input);
        const WeightGradientQueue::Scope scope(queue, {});
        return forward(input);
      });
    };
  }

  static void on_output(nn::Module& module, std::function<at::Tensor(const at::Tensor&)> change) {
    module.add_parameter_hooks(
        [](nn::Module&) {},
        [change = std::move(change)](nn::Module&, const at::Tensor& output) { return change(output); });
  }

  static Attach convert_output(nn::Module& module, const ActivationLayout& from, const ActivationLayout& to) {
    return [&module, from, to](const std::shared_ptr<Communicator>& group) {
      if (from == to) return;
      on_output(module, [=](const at::Tensor& output) { return convert(output, from, to, group); });
    };
  }

  void own(const std::string& what, const at::Tensor& parameter, const ParameterSplit& split) {
    if (!parameter.defined()) return;
    const auto [found, is_new] = splits_.emplace(parameter.unsafeGetTensorImpl(), split);
    if (!is_new && found->second != split) {
      throw ConfigError(fmt::format("{}: another entry of the plan says otherwise of its parameter '{}'", what,
                                    names_.at(parameter.unsafeGetTensorImpl())));
    }
  }

  void once(const std::string& what, const nn::Module& module) {
    if (!styled_.insert(&module).second) {
      throw ConfigError(fmt::format("{}: another entry of the plan has a style for its parameters, too", what));
    }
  }

  static std::int64_t overlapped_dim(const std::string& what, const ActivationLayout& layout) {
    if (layout.kind == ActivationLayout::Kind::split && layout.dim != -1) return layout.dim;
    throw ConfigError(fmt::format(
        "{}: products can overlap the exchange of rows only: expected activations split along another than the last "
        "dimension, for example split(1), found {}",
        what, layout.text()));
  }

  void take(const std::string& name, nn::Module& module, const Overlapped& style) {
    const std::string what = described(name, "Overlapped");
    once(what, module);
    const std::int64_t dim = overlapped_dim(what, style.activations);
    const auto set_collective_matmul = [&](auto& layer) {
      styles_.push_back([&layer, dim](const std::shared_ptr<Communicator>& group) {
        layer.set_collective_matmul(overlapped_collective_matmul(group, dim));
      });
    };
    if (auto* attention = dynamic_cast<nn::Attention*>(&module)) {
      set_collective_matmul(*attention);
      expect_projections(what, {attention->wq.get(), attention->wk.get(), attention->wv.get()}, attention->wo.get());
    } else if (auto* feed_forward = dynamic_cast<nn::FeedForward*>(&module)) {
      set_collective_matmul(*feed_forward);
      expect_projections(what, {feed_forward->w1.get(), feed_forward->w3.get()}, feed_forward->w2.get());
    } else {
      refuse(what, module, "an Attention or a FeedForward");
    }
  }

  // Runs once the whole plan has been read.
  void expect_projections(const std::string& what, const std::vector<const nn::Linear*>& first,
                          const nn::Linear* last) {
    checks_.push_back([this, what, first, last] {
      const bool are_first = std::ranges::all_of(first, [&](const auto* linear) {
        const auto found = columns_.find(linear);
        return found != columns_.end() && found->second.input == ActivationLayout::shared() &&
               found->second.output == ActivationLayout::split(-1);
      });
      const auto found = rows_.find(last);
      const bool is_last = found != rows_.end() && found->second.input == ActivationLayout::split(-1) &&
                           found->second.output == ActivationLayout::partial();
      if (last->bias.defined()) {
        throw ConfigError(what + ": the bias of the last projection would not be added; expected one without a bias");
      }
      if (are_first && is_last) return;
      throw ConfigError(what +
                        ": it exchanges what its projections take and give; expected Colwise{.input = shared()} for "
                        "those of its input and Rowwise{.output = partial()} for the last one");
    });
  }

  void take(const std::string& name, nn::Module& module, const ColwiseParallel& style) {
    const std::string what = described(name, "Colwise");
    once(what, module);
    columns_.emplace(&module, style);
    const std::map<std::string, int> copies_of = copies_of_parameters(what, module, style);
    check_conversion(what + ", output", ActivationLayout::split(-1), style.output);
    const auto take_input = [&](auto& layer) {
      check_conversion(what + ", input", style.input, ActivationLayout::shared());
      for (const auto& p : layer.named_parameters(/*recurse=*/false)) {
        const auto copies = copies_of.find(p.key());
        own(what, p.value(), copies == copies_of.end() ? ParameterSplit{} : ParameterSplit{0, copies->second});
      }
      if (!style.overlap || has_own_product(layer)) {
        styles_.push_back(convert_input(module, style.input, ActivationLayout::shared()));
        return;
      }
      styles_.push_back([&layer, dim = overlapped_dim(what, style.input)](const auto& group) {
        layer.set_all_gather_matmul(overlapped_collective_matmul(group, dim));
      });
    };
    if (auto* linear = dynamic_cast<nn::Linear*>(&module)) {
      take_input(*linear);
    } else if (auto* fused = dynamic_cast<nn::FusedLinear*>(&module)) {
      if (style.output != ActivationLayout::split(-1)) {
        throw ConfigError(
            fmt::format("{}: a rank's columns of each part are not one range of all columns, so the "
                        "output stays split(-1), found {}",
                        what, style.output.text()));
      }
      take_input(*fused);
    } else if (auto* embedding = dynamic_cast<nn::Embedding*>(&module)) {
      if (style.overlap) refuse(what + ", overlap", module, "a Linear");
      own(what, embedding->weight, {1, style.copies});
    } else {
      refuse(what, module, "a Linear or an Embedding");
    }
    styles_.push_back(convert_output(module, ActivationLayout::split(-1), style.output));
    for (const auto& [parameter, copies] : copies_of) {
      if (copies == 1) continue;
      copies_.insert(copies);
      sum_gradient(name, module, parameter, copies);
    }
    // Every rank has all of it, and sees the gradient of its own columns of y alone.
    if (has_adapter(module)) sum_gradient(name, module, kAdapterA, 0);
  }

  void expect_copies(const std::string& what, int copies) const {
    const int ranks = mesh_.size(kTensorAxis);
    if (copies >= 1 && ranks % copies == 0) return;
    throw ConfigError(fmt::format("{}: copies = {}: expected a divisor of the {} ranks along '{}'", what, copies, ranks,
                                  kTensorAxis));
  }

  // How many neighbouring ranks hold the same part of each parameter that is cut.
  std::map<std::string, int> copies_of_parameters(const std::string& what, const nn::Module& module,
                                                  const ColwiseParallel& style) const {
    std::map<std::string, int> result;
    for (const auto& p : module.named_parameters(/*recurse=*/false)) result[p.key()] = style.copies;
    for (const char* whole : {kAdapterA, kNestedScales}) result.erase(whole);  // on every rank
    for (const auto& [name, copies] : style.part_copies) {
      const auto* fused = dynamic_cast<const nn::FusedLinear*>(&module);
      if (fused == nullptr) refuse(what + ", part_copies", module, "a FusedLinear");
      const auto part = std::ranges::find(fused->part_list(), name, &nn::FusedPart::name);
      if (part == fused->part_list().end()) {
        std::vector<std::string> known;
        for (const nn::FusedPart& one : fused->part_list()) known.push_back(one.name);
        throw ConfigError(fmt::format("{}: part_copies names '{}', which is no part of it: expected one of {}", what,
                                      name, fmt::join(known, ", ")));
      }
      result[name] = copies;
      if (part->bias) result[part->bias_name()] = copies;
    }
    for (const auto& [parameter, copies] : result) {
      expect_copies(what, copies);
      if (copies > 1 && style.output != ActivationLayout::split(-1)) {
        throw ConfigError(fmt::format("{}: with copies = {} the output stays split(-1), found {}", what, copies,
                                      style.output.text()));
      }
    }
    return result;
  }

  void take(const std::string& name, nn::Module& module, const RowwiseParallel& style) {
    const std::string what = described(name, "Rowwise");
    once(what, module);
    rows_.emplace(&module, style);
    check_conversion(what + ", output", ActivationLayout::partial(), style.output);
    if (auto* embedding = dynamic_cast<nn::Embedding*>(&module)) {
      if (style.overlap) refuse(what + ", overlap", module, "a Linear");
      own(what, embedding->weight, {0});
      styles_.push_back(convert_output(module, ActivationLayout::partial(), style.output));
      return;
    }
    auto* linear = dynamic_cast<nn::Linear*>(&module);
    if (linear == nullptr) refuse(what, module, "a Linear or an Embedding");
    if (style.input != ActivationLayout::split(-1))
      check_conversion(what + ", input", style.input, ActivationLayout::split(-1));
    own(what, linear->weight, {1});
    own(what, linear->bias, {});
    if (linear->nf4_tables()) {
      const int ranks = mesh_.size(kTensorAxis);
      if (linear->weight_absmax.size(1) % ranks != 0) {
        throw ConfigError(
            fmt::format("{}: its rows of {} elements are {} blocks of {} in NF4, which {} ranks of '{}' cannot share "
                        "without splitting one; expected a degree that divides {}, or a base in another type",
                        what, linear->options().in_features, linear->weight_absmax.size(1), kNf4Block, ranks,
                        kTensorAxis, linear->weight_absmax.size(1)));
      }
      own(what, linear->weight_absmax, {1});
      own(what, linear->weight_nested, {});
    }
    own(what, linear->lora_a, {1});
    own(what, linear->lora_b, {});
    const bool overlaps = style.overlap && !linear->has_own_product();
    if (linear->has_adapter()) {
      // Each rank makes an addend of y from its columns of x, and an addend of this gradient.
      sum_gradient(name, module, kAdapterB, 0);
      if (const std::shared_ptr<nn::Dropout>& dropout = linear->adapter_dropout()) {
        styles_.push_back([dropout](const std::shared_ptr<Communicator>& group) {
          dropout->set_split({.dim = -1, .part = group->rank(), .parts = group->size()});
        });
      }
    }
    styles_.push_back(convert_input(module, style.input, ActivationLayout::split(-1)));
    if (overlaps) {
      styles_.push_back([linear, dim = overlapped_dim(what, style.output)](const auto& group) {
        linear->set_matmul_reduce_scatter(overlapped_collective_matmul(group, dim));
      });
    }
    const ActivationLayout made = overlaps ? style.output : ActivationLayout::partial();
    if (!linear->bias.defined()) {
      styles_.push_back(convert_output(module, made, style.output));
      return;
    }
    if (style.output == ActivationLayout::partial()) {
      // An addend of the first rank alone. The gradient of partial outputs is whole on every rank, so the bias has its
      // own there.
      styles_.push_back([linear](const std::shared_ptr<Communicator>& group) {
        if (group->rank() == 0) return;
        linear->set_parameter_use("bias", [](const at::Tensor& bias) { return bias - bias.detach(); });
      });
      return;
    }
    styles_.push_back([linear, made, output = style.output](const std::shared_ptr<Communicator>& group) {
      // The sum over the ranks first, then the bias, once.
      linear->set_parameter_use("bias", [](const at::Tensor&) { return at::Tensor(); });
      on_output(*linear, [=, bias = linear->bias](const at::Tensor& y) {
        const bool has_all = output == ActivationLayout::replicated();
        return convert(y, made, output, group).add(has_all ? bias : copy_to_group(bias, group));
      });
    });
  }

  void take(const std::string& name, nn::Module& module, const SequenceParallel& style) {
    const std::string what = described(name, "SequenceParallel");
    once(what, module);
    if (auto* dropout = dynamic_cast<nn::Dropout*>(&module)) {
      styles_.push_back([dropout, dim = style.dim](const std::shared_ptr<Communicator>& group) {
        dropout->set_split({.dim = dim, .part = group->rank(), .parts = group->size()});
      });
      return;
    }
    const bool reads_by_used = dynamic_cast<nn::Norm*>(&module) != nullptr ||
                               dynamic_cast<nn::Linear*>(&module) != nullptr ||
                               dynamic_cast<nn::Embedding*>(&module) != nullptr;
    if (!reads_by_used) refuse(what, module, "a norm, a Linear, an Embedding or a Dropout");
    for (const auto& p : module.named_parameters(/*recurse=*/false)) {
      own(what, p.value(), {});
      sum_gradient(name, module, p.key(), 0);
    }
  }

  void take(const std::string& name, nn::Module& module, const SplitNorm& style) {
    const std::string what = described(name, "SplitNorm");
    once(what, module);
    auto* norm = dynamic_cast<nn::RMSNorm*>(&module);
    if (norm == nullptr) refuse(what, module, "an RMSNorm");
    expect_copies(what, style.copies);
    own(what, norm->weight, {0, style.copies});
    if (style.copies > 1) {
      copies_.insert(style.copies);
      sum_gradient(name, module, "weight", style.copies);
    }
    styles_.push_back([norm](const std::shared_ptr<Communicator>& group) {
      // The parts are equally long, and each is there equally often. The ranks do different things with the sum.
      norm->set_group_mean([group](const at::Tensor& mean) {
        return copy_to_group(reduce_from_group(mean, group), group) / static_cast<double>(group->size());
      });
    });
  }

  void take(const std::string& name, nn::Module& module, const SplitSinks& /*style*/) {
    const std::string what = described(name, "SplitSinks");
    once(what, module);
    auto* attention = dynamic_cast<nn::Attention*>(&module);
    if (attention == nullptr || !attention->sinks.defined()) refuse(what, module, "an Attention with sinks");
    own(what, attention->sinks, {0});
  }

  void take(const std::string& name, nn::Module& module, const PrepareModuleInput& style) {
    check_conversion(described(name, "PrepareInput"), style.from, style.to);
    prepare_inputs_.push_back(convert_input(module, style.from, style.to));
  }

  void take(const std::string& name, nn::Module& module, const PrepareModuleOutput& style) {
    check_conversion(described(name, "PrepareOutput"), style.from, style.to);
    prepare_outputs_.push_back(convert_output(module, style.from, style.to));
  }

  MeshShape mesh_seen_in(int copies) const {
    std::vector<MeshAxis> axes;
    for (const auto& axis : mesh_.axes()) {
      if (axis.name != kTensorAxis || copies == 1) {
        axes.push_back(axis);
        continue;
      }
      axes.push_back({"tp_part", axis.size / copies});
      axes.push_back({"tp_copy", copies});
    }
    return MeshShape(axes);
  }

  void add_shard(const torch::nn::Module& module, const at::Tensor& parameter) {
    if (dynamic_cast<const nn::Module*>(&module) == nullptr) return;
    const void* const impl = parameter.unsafeGetTensorImpl();
    if (shards_.contains(impl)) return;
    const auto found = splits_.find(impl);
    const ParameterSplit split = found == splits_.end() ? ParameterSplit{} : found->second;
    const std::string& name = names_.at(impl);
    const int parts = mesh_.size(kTensorAxis) / split.copies;
    Placement placement;
    if (split.dim) {
      const std::int64_t extent = parameter.size(*split.dim);
      if (extent % parts != 0) {
        throw ConfigError(fmt::format(
            "parallelize_module: '{}' [{}] cannot be split evenly along dimension {} over {} ranks of '{}': {} % {} = "
            "{}, expected 0; the nearest sizes are {} and {}",
            name, fmt::join(parameter.sizes(), ", "), *split.dim, parts, kTensorAxis, extent, parts, extent % parts,
            std::max<std::int64_t>(extent / parts, 1) * parts, (extent / parts + 1) * parts));
      }
      placement.splits.push_back({.axis = split.copies == 1 ? kTensorAxis : "tp_part", .dim = *split.dim, .sizes = {}});
    }
    const ShardSpec spec(name, parameter.sizes().vec(), data_type_of(parameter.scalar_type()),
                         mesh_seen_in(split.copies), std::move(placement));
    shards_.emplace(impl, std::make_shared<const Shard>(Shard{spec, mesh_.rank()}));
    tensors_.emplace(impl, parameter);
  }

  static at::Tensor part_of(const at::Tensor& parameter, const Box& box) {
    if (!has_memory(parameter)) {
      at::Tensor shell = at::empty({0}, parameter.options());
      shell.unsafeGetTensorImpl()->set_sizes_contiguous(box.shape);
      return shell;
    }
    return narrow_to_box(parameter.detach(), box).clone(at::MemoryFormat::Contiguous);
  }

  const DeviceMesh& mesh_;
  std::vector<NamedModule> modules_;
  std::map<const void*, std::string> names_;  // of parameters
  std::map<const void*, ParameterSplit> splits_;
  std::map<const void*, std::shared_ptr<const Shard>> shards_;
  std::map<const void*, at::Tensor> tensors_;
  std::set<const nn::Module*> styled_;
  std::map<const nn::Module*, ColwiseParallel> columns_;
  std::map<const nn::Module*, RowwiseParallel> rows_;
  std::vector<std::function<void()>> checks_;
  std::set<int> copies_;
  std::vector<Attach> prepare_outputs_, styles_, prepare_inputs_;
  std::map<CoalescingKey, std::vector<CoalescedParameter>> coalesced_;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> parallelize_module(torch::nn::Module& model, const DeviceMesh& mesh,
                                                              const std::vector<ParallelStyle>& plan) {
  if (!mesh.has(kTensorAxis)) {
    throw ConfigError(fmt::format("parallelize_module: {} has no axis '{}': make one, of one rank if need be",
                                  mesh.text(), kTensorAxis));
  }
  Parallelizer parallelizer(model, mesh);
  parallelizer.read(plan);
  return parallelizer.apply();
}

}  // namespace phalanx
